"""summary.json: what a run did, from its metrics and evaluations."""

from pathlib import Path
from typing import Any

from megatron_opsft.config import Config
from megatron_opsft.config_file import config_hash
from megatron_opsft.report.lines import read_json_lines


def summarize(directory: Path, config: Config) -> dict[str, Any]:
    """Accuracy and length before and after, steps and seconds. Errors: as of `read_json_lines`."""
    measured = ("accuracy", "mean_response_tokens", "samples")
    evaluations = read_json_lines(
        directory / "evals.jsonl", required=[f"eval_{key}" for key in measured]
    )
    steps = read_json_lines(directory / "metrics.jsonl", required=("num_accepted", "step_seconds"))
    summary: dict[str, Any] = {}
    for name, line in (("base", evaluations[:1]), ("final", evaluations[-1:])):
        summary[name] = {key: line[0][f"eval_{key}"] if line else None for key in measured}
    summary["steps"] = config.run.steps
    summary["skipped_steps"] = sum(line["num_accepted"] == 0 for line in steps)
    summary["seconds"] = sum(line["step_seconds"] for line in steps)
    summary["config_hash"] = config_hash(config)
    return summary
