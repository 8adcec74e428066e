"""What the page shows of an evaluation: its results.json."""

import json
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError


def is_evaluation(path: Path) -> bool:
    """Whether a finished evaluation is there."""
    return (path / "results.json").is_file()


def samples_of(directory: Path) -> dict[str, list[Path]]:
    """Benchmark -> its files of samples."""
    ending = ".jsonl.gz"
    paths = sorted((directory / "samples").glob(f"*{ending}"))
    return {path.name.removesuffix(ending): [path] for path in paths}


def evaluation_data(directory: Path) -> dict[str, Any]:
    """Errors: `UserError` where there is no results.json of an evaluation."""
    path = directory / "results.json"
    if not path.is_file():
        raise UserError(f"{path}: not found; `megatron-opsft eval` writes it when it ends")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        blocks = {**results["benchmarks"], "overall": results["overall"]}
        shown = {name: _block(block) for name, block in blocks.items()}
        model, settings = str(results["model"]), dict(results["settings"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(
            f"{path}: not the results of an evaluation; restore it, or evaluate again"
        ) from None
    return {
        "name": model,
        "directory": str(directory),
        "baseline": results.get("baseline"),
        "settings": {
            key: value if isinstance(value, str | int | float | None) else json.dumps(value)
            for key, value in settings.items()
        },
        "blocks": shown,
    }


def _block(block: dict[str, Any]) -> dict[str, Any]:
    """metrics: name -> [value, low, high]; budgets: [budget, metrics] in their order."""
    return {
        "metrics": _estimates(block["metrics"]),
        "budgets": [[point["budget"], _estimates(point["metrics"])] for point in block["budgets"]],
        "num_problems": block.get("num_problems"),
        "samples_per_problem": block.get("samples_per_problem"),
    }


def _estimates(metrics: dict[str, Any]) -> dict[str, list[float | None]]:
    return {
        name: [estimate["value"], estimate["low"], estimate["high"]]
        for name, estimate in metrics.items()
    }
