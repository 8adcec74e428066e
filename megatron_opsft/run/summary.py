"""summary.json: what a run did, from its metrics and evaluations."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.config import Config
from megatron_opsft.config.identity import config_hash
from megatron_opsft.report.lines import read_json_lines
from megatron_opsft.run.best import best_evaluation

_MEASURED = ("accuracy", "mean_response_tokens", "samples")


def summarize(
    directory: Path, config: Config, num_steps: int, patience: int | None
) -> dict[str, Any]:
    """Accuracy and length before, after and at best, steps and seconds. patience: eval.patience,
    if that ended the run. Errors: as of `read_json_lines`.
    """
    evaluations = read_json_lines(
        directory / "evals.jsonl", required=[f"eval_{key}" for key in _MEASURED]
    )
    steps = read_json_lines(directory / "metrics.jsonl", required=("num_accepted", "step_seconds"))
    summary = before_and_after(evaluations)
    best = best_evaluation(evaluations, config.eval.best_within)
    if best is not None:
        summary["best"] = {key: best[f"eval_{key}"] for key in _MEASURED} | {"step": best["step"]}
    if patience is not None:
        summary["patience"] = patience
    summary["steps"] = num_steps
    summary["skipped_steps"] = sum(line["num_accepted"] == 0 for line in steps)
    summary["seconds"] = sum(line["step_seconds"] for line in steps)
    summary["config_hash"] = config_hash(config)
    return summary


def before_and_after(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """base and final: accuracy, mean response tokens and samples of the first and of the last
    evaluation, None where there is none; more: the same of each set of eval.more, by name.
    """
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})

    def ends(prefix: str) -> dict[str, Any]:
        return {
            name: {key: line.get(f"{prefix}_{key}") for key in _MEASURED}
            for name, line in (("base", first), ("final", last))
        }

    names = [found[1] for key in first if (found := re.fullmatch(r"eval_(\w+)_accuracy", key))]
    return ends("eval") | {"more": {name: ends(f"eval_{name}") for name in names}}
