"""What the page shows of evaluations: their results.json as rows of a table, and their samples."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.report.estimate import Estimate
from megatron_opsft.report.table import OVERALL, Metrics, TableRow


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationData:
    """row: with all blocks of results.json; sizes: benchmark -> its problems and samples."""

    row: TableRow
    sizes: Mapping[str, str]


def is_evaluation(path: Path) -> bool:
    """Whether a finished evaluation is there."""
    return (path / "results.json").is_file()


def samples_of(directory: Path) -> dict[str, list[Path]]:
    """Benchmark -> its files of samples."""
    ending = ".jsonl.gz"
    paths = sorted((directory / "samples").glob(f"*{ending}"))
    return {path.name.removesuffix(ending): [path] for path in paths}


def read_evaluation(directory: Path) -> EvaluationData:
    """Errors: `UserError` where there is no results.json of an evaluation."""
    path = directory / "results.json"
    if not path.is_file():
        raise UserError(f"{path}: not found; `megatron-opsft eval` writes it when it ends")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        blocks = {**results["benchmarks"], OVERALL: results["overall"]}
        row = TableRow(
            label=str(results["model"]),
            blocks={name: _metrics(block["metrics"]) for name, block in blocks.items()},
            budgets={
                name: [(int(at["budget"]), _metrics(at["metrics"])) for at in block["budgets"]]
                for name, block in blocks.items()
            },
            reference=results.get("baseline"),
        )
        sizes = {
            name: f"{block['num_problems']} problems, {block['samples_per_problem']} samples each"
            for name, block in results["benchmarks"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(
            f"{path}: not the results of an evaluation; restore it, or evaluate again"
        ) from None
    return EvaluationData(row=row, sizes=sizes)


def blocks_of(rows: Sequence[TableRow]) -> list[tuple[str, str, list[TableRow]]]:
    """(block, heading, rows) of what can stand in one table: overall values only of evaluations on
    the same benchmarks; of a single benchmark they are its own.
    """
    found: dict[tuple[str, str], list[TableRow]] = {}
    sets = {tuple(row.blocks) for row in rows}
    for row in rows:
        for block in row.blocks:
            names = [name for name in row.blocks if name != OVERALL]
            if block == OVERALL and len(names) == 1:
                continue
            several = block == OVERALL and len(sets) > 1
            heading = f"overall of {', '.join(names)}" if several else block
            found.setdefault((block, heading), []).append(row)
    return [(block, heading, own) for (block, heading), own in found.items()]


def _metrics(metrics: dict[str, Any]) -> Metrics:
    return {name: Estimate.model_validate(value) for name, value in metrics.items()}
