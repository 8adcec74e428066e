"""What the paths given to `report` hold: runs, evaluations, and studies of both."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.report.runs import holds_run
from megatron_opsft.report.table import OVERALL, Estimate, Metrics, TableRow
from megatron_opsft.runtime.durable import rollout_files


@dataclass(slots=True, kw_only=True)
class Parts:
    """Directories by what they hold; whatever is nothing else is taken for a run."""

    runs: list[Path]
    evaluations: list[Path]


def parts_of(paths: Sequence[Path]) -> Parts:
    """A study is every training and every evaluation that it has begun or finished."""
    parts = Parts(runs=[], evaluations=[])
    for path in paths:
        if _is_evaluation(path):
            parts.evaluations.append(path)
        elif members := _members_of(path):
            for member in members:
                parts.runs += _trainings_in(member)
                parts.evaluations += filter(_is_evaluation, [member / "eval"])
        else:
            parts.runs.append(path)
    return parts


def is_study(path: Path) -> bool:
    """Whether a run of a study has been begun there."""
    return bool(_members_of(path))


def _members_of(study: Path) -> list[Path]:
    """Directories of a study's runs, by name."""
    return [found.parent for found in sorted(study.glob("runs/*/definition.json"))]


def _trainings_in(member: Path) -> list[Path]:
    """Run directories of one run of a study: one, or one a round in their order."""
    rounds = sorted(member.glob("train/round_*"), key=lambda path: (len(path.name), path.name))
    return [path for path in (member / "train", *rounds) if holds_run(path)]


def _is_evaluation(path: Path) -> bool:
    return (path / "results.json").is_file()


def rollouts_of(run: Path) -> dict[int, list[Path]]:
    """Step -> its files of responses."""
    steps: dict[int, list[Path]] = {}
    for step, path in rollout_files(run / "rollouts"):
        steps.setdefault(step, []).append(path)
    return steps


def samples_of(evaluation: Path) -> dict[str, list[Path]]:
    """Benchmark -> its files of samples."""
    ending = ".jsonl.gz"
    paths = sorted((evaluation / "samples").glob(f"*{ending}"))
    return {path.name.removesuffix(ending): [path] for path in paths}


def read_evaluation(directory: Path) -> TableRow:
    """All blocks of results.json. Errors: `UserError` where there is none of an evaluation."""
    path = directory / "results.json"
    if not path.is_file():
        raise UserError(f"{path}: not found; `megatron-opsft eval` writes it when it ends")
    try:
        results = json.loads(path.read_bytes())
        blocks = {**results["benchmarks"], OVERALL: results["overall"]}
        return TableRow(
            label=str(results["model"]),
            blocks={name: _metrics(block) for name, block in blocks.items()},
            budgets={
                name: [(int(at["budget"]), _metrics(at)) for at in block["budgets"]]
                for name, block in blocks.items()
            },
            reference=results.get("baseline"),
            sizes={
                name: "{num_problems} problems, {samples_per_problem} samples each".format(**block)
                for name, block in results["benchmarks"].items()
            },
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(
            f"{path}: not the results of an evaluation; restore it, or evaluate again"
        ) from None


def _metrics(block: dict[str, Any]) -> Metrics:
    return {name: Estimate.model_validate(value) for name, value in block["metrics"].items()}
