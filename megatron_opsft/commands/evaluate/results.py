"""results.json: every metric of one model with its interval, read back with validation.

The same samples in any order give the same bytes. Settings are the caller's: whatever two results
can differ by (sampling, template, data hash, engine version), but not the model itself.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from megatron_opsft.commands.evaluate.benchmarks import ordered
from megatron_opsft.commands.evaluate.metrics import (
    LEVEL,
    NUM_RESAMPLES,
    SEED,
    Floats,
    arrange,
    combine,
    draw_counts,
    estimate,
    measure,
    measure_at,
)
from megatron_opsft.commands.report.table import OVERALL, Estimate, Size
from megatron_opsft.data.stored_samples import StoredSample
from megatron_opsft.errors import UserError

Samples = Mapping[str, Sequence[StoredSample]]  # of each benchmark
_Draws = dict[str, Floats]  # metric -> [1 + R]
_Limited = dict[
    int | None, _Draws
]  # token budget, None for the samples as they are -> draws


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BudgetPoint(_Record):
    """Metrics had generation stopped after `budget` tokens."""

    budget: int = Field(ge=1)
    metrics: dict[str, Estimate]


class BlockResults(_Record):
    """metrics: as in `metrics`, and compression_ratio where there is a baseline; no norm_std of a
    single sample.

    differences: metric -> this model minus the baseline, by paired bootstrap; empty without one.
    """

    metrics: dict[str, Estimate]
    differences: dict[str, Estimate]
    budgets: tuple[BudgetPoint, ...]


class BenchmarkResults(BlockResults):
    """Those of one benchmark, and its true size."""

    num_problems: int = Field(ge=1)
    samples_per_problem: int = Field(ge=1)


class Results(_Record):
    """The whole of results.json."""

    schema_version: Literal[1] = 1
    model: str
    baseline: str | None
    settings: dict[str, JsonValue]
    bootstrap: dict[str, int | float] = {
        "num_resamples": NUM_RESAMPLES,
        "seed": SEED,
        "level": LEVEL,
    }
    benchmarks: dict[str, BenchmarkResults] = Field(min_length=1)
    overall: BlockResults

    @property
    def blocks(self) -> dict[str, BlockResults]:
        """Those of every benchmark, and OVERALL."""
        return {**self.benchmarks, OVERALL: self.overall}

    def size(self, block: str) -> Size:
        """How many problems and responses a block's metrics rest on."""
        parts = (
            list(self.benchmarks.values())
            if block == OVERALL
            else [self.benchmarks[block]]
        )
        return Size(
            problems=sum(part.num_problems for part in parts),
            samples=sorted({part.samples_per_problem for part in parts}),
        )


def build_results(
    name: str,
    samples: Samples,
    settings: Mapping[str, JsonValue],
    *,
    budgets: Sequence[int],
    baseline: tuple[str, Samples] | None = None,
) -> Results:
    """Everything results.json holds. name: of the model, in tables and figures.

    budgets: ascending. baseline: its name, and samples of the same problems of every benchmark, any
    number of each.
    """
    own: list[_Limited] = []
    base: list[_Draws] = []
    benchmarks = {}
    for benchmark in ordered(samples):
        grid = arrange(samples[benchmark])
        counts = draw_counts(grid.num_problems, benchmark)
        own.append({None: measure(grid, counts)})
        own[-1].update((limit, measure_at(grid, limit, counts)) for limit in budgets)
        if baseline is not None:
            base_grid = arrange(baseline[1][benchmark])
            base.append(measure(base_grid, counts))
            if base_grid.samples_per_problem != grid.samples_per_problem:
                del base[-1]["pass_at_n"]  # of another N: no difference
        benchmarks[benchmark] = BenchmarkResults(
            **_estimated(own[-1], base[-1] if base else None),
            num_problems=grid.num_problems,
            samples_per_problem=grid.samples_per_problem,
        )
    # Benchmarks were resampled independently of each other.
    overall = {limit: combine([draws[limit] for draws in own]) for limit in own[0]}
    return Results(
        model=name,
        baseline=baseline[0] if baseline is not None else None,
        settings=dict(settings),
        benchmarks=benchmarks,
        overall=BlockResults(**_estimated(overall, combine(base) if base else None)),
    )


def _estimated(own: _Limited, base: _Draws | None) -> dict[str, Any]:
    """The fields of `BlockResults`."""
    found = {
        limit: {name: estimate(value) for name, value in draws.items()}
        for limit, draws in own.items()
    }
    metrics, differences = found.pop(None), {}
    if base is not None:
        metrics["compression_ratio"] = estimate(
            own[None]["mean_tokens"] / base["mean_tokens"]
        )
        differences = {
            name: estimate(value - base[name])
            for name, value in own[None].items()
            if name in base
        }
    points = [
        BudgetPoint(budget=limit, metrics=at) for limit, at in found.items() if limit
    ]
    return {"metrics": metrics, "differences": differences, "budgets": tuple(points)}


def to_json(results: Results) -> str:
    """The text of results.json."""
    tree = results.model_dump(mode="json")
    tree["settings"] = json.loads(json.dumps(tree["settings"], sort_keys=True))
    return json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_results(directory: Path) -> Results:
    """Those of an evaluation. Errors: `UserError` with file and field where there are none, or they
    are damaged or of other make.
    """
    path = directory / "results.json"
    if not path.is_file():
        raise UserError(
            f"{path}: not found; `megatron-opsft eval` writes it when it ends"
        )
    try:
        return Results.model_validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "results"
        raise UserError(f"{path}: {field}: {first['msg']}") from None
