"""summary.json: what a run did, from its metrics and evaluations."""

from pathlib import Path
from typing import Any

from megatron_opsft.config import Config
from megatron_opsft.config.identity import config_hash
from megatron_opsft.report.before_after import before_and_after
from megatron_opsft.report.lines import read_json_lines
from megatron_opsft.run.best import best_evaluation


def summarize(
    directory: Path, config: Config, num_steps: int, patience: int | None
) -> dict[str, Any]:
    """Accuracy and length before, after and at best, steps and seconds. patience: eval.patience,
    if that ended the run. Errors: as of `read_json_lines`.
    """
    measured = ("accuracy", "mean_response_tokens", "samples")
    evaluations = read_json_lines(
        directory / "evals.jsonl", required=[f"eval_{key}" for key in measured]
    )
    steps = read_json_lines(directory / "metrics.jsonl", required=("num_accepted", "step_seconds"))
    summary = before_and_after(evaluations)
    best = best_evaluation(evaluations, config.eval.best_within)
    if best is not None:
        summary["best"] = {key: best[f"eval_{key}"] for key in measured} | {"step": best["step"]}
    if patience is not None:
        summary["patience"] = patience
    summary["steps"] = num_steps
    summary["skipped_steps"] = sum(line["num_accepted"] == 0 for line in steps)
    summary["seconds"] = sum(line["step_seconds"] for line in steps)
    summary["config_hash"] = config_hash(config)
    return summary
