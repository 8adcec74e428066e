"""Measured points: what the metrics of runs say."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from megatron_opsft.plan.measured import read_metrics
from megatron_opsft.plan.scaling.points import Point
from megatron_opsft.plan.scaling.simulated import model_name


def measured_point(run_dir: Path) -> Point:
    """Medians over the steps of a run, without the first ones. Errors: `UserError`."""
    config, ranks, lines = read_metrics(run_dir)

    def middle(of: Callable[[dict[str, Any]], float]) -> float:
        return float(median(of(line) for line in lines))

    return Point(
        simulated=False,
        source=str(run_dir),
        model=model_name(config.model.path),
        ranks=ranks,
        tp=config.parallel.tp,
        pp=config.parallel.pp,
        vpp=config.parallel.vpp or 1,
        rollout_tp=config.rollout.tp,
        prompts_per_step=config.data.prompts_per_step,
        group_size=config.rollout.group_size,
        max_response_tokens=config.rollout.max_response_tokens,
        steps=len(lines),
        step_seconds=middle(lambda line: line["step_seconds"]),
        rollout_seconds=middle(lambda line: line["rollout_seconds"]),
        verify_seconds=middle(lambda line: line["verify_seconds"]),
        train_seconds=middle(lambda line: line["train_seconds"]),
        push_seconds=middle(lambda line: line["sync_seconds"]),
        tokens_per_second=middle(
            lambda line: line["mean_response_tokens"] * line["num_rollouts"] / line["step_seconds"]
        ),
    )
