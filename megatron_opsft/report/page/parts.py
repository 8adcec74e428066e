"""What the paths given to `report` hold: runs, evaluations, and studies of both."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_opsft.report.page.evaluation_data import is_evaluation
from megatron_opsft.report.page.run_data import holds_run

_DEFINITION = "definition.json"  # of a run of a study


@dataclass(slots=True, kw_only=True)
class Parts:
    """Directories by what they hold; whatever is nothing else is taken for a run."""

    runs: list[Path] = field(default_factory=list)
    evaluations: list[Path] = field(default_factory=list)


def parts_of(paths: Sequence[Path]) -> Parts:
    """A study is every training and every evaluation that it has begun or finished."""
    parts = Parts()
    for path in paths:
        if is_evaluation(path):
            parts.evaluations.append(path)
        elif is_study(path):
            for member in members_of(path):
                parts.runs += trainings_in(member)
                if is_evaluation(member / "eval"):
                    parts.evaluations.append(member / "eval")
        else:
            parts.runs.append(path)
    return parts


def is_study(path: Path) -> bool:
    """Whether a run of a study has been begun there."""
    return any(members_of(path))


def members_of(study: Path) -> Iterator[Path]:
    """Directories of a study's runs, by name."""
    yield from (found.parent for found in sorted(study.glob(f"runs/*/{_DEFINITION}")))


def trainings_in(member: Path) -> list[Path]:
    """Run directories of one run of a study: one, or one a round in their order."""
    train = member / "train"
    if holds_run(train):
        return [train]
    rounds = (path for path in train.glob("round_*") if holds_run(path))
    return sorted(rounds, key=lambda path: (len(path.name), path.name))
