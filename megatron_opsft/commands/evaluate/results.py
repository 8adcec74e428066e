"""results.json: every metric of one model with its interval, read back with validation.

The same samples in any order give the same bytes. Settings are the caller's: whatever two results
can differ by (sampling, template, data hash, engine version), but not the model itself.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from megatron_opsft.commands.evaluate.benchmarks import ordered
from megatron_opsft.commands.evaluate.metrics import (
    LEVEL,
    NUM_RESAMPLES,
    SEED,
    Floats,
    SampleGrid,
    arrange,
    combine,
    draw_counts,
    estimate,
    mean_over_problems,
    measure,
    measure_at,
    problem_values,
)
from megatron_opsft.commands.report.table import OVERALL, Estimate, Size
from megatron_opsft.data.stored_samples import StoredSample
from megatron_opsft.errors import UserError
from megatron_opsft.records import JsonObject, record

Samples = Mapping[str, Sequence[StoredSample]]
"""Benchmark -> its samples."""
_Draws = dict[str, Floats]
"""Metric -> its draws, [1 + R]."""


@record
class MeasuredSamples:
    """What paired differences need of a model's samples; their texts are not kept."""

    problems: Mapping[str, Sequence[str]]
    """Benchmark -> ids of its problems, in order."""
    grids: Mapping[str, SampleGrid]
    """Benchmark -> its samples."""

    @classmethod
    def of(cls, samples: Samples) -> "MeasuredSamples":
        """Measure samples. Errors: those of `arrange`."""
        problems = {
            benchmark: sorted({sample.problem_id for sample in of_benchmark})
            for benchmark, of_benchmark in samples.items()
        }
        grids = {benchmark: arrange(samples[benchmark]) for benchmark in samples}
        return cls(problems=problems, grids=grids)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BudgetPoint(_Record):
    """Metrics had generation stopped after `budget` tokens."""

    budget: int = Field(ge=1)
    metrics: dict[str, Estimate]


class BlockResults(_Record):
    """Metrics of a block: one benchmark, or all of them."""

    metrics: dict[str, Estimate]
    """Those of `metrics.measure`, and compression_ratio if there is a baseline."""
    differences: dict[str, Estimate]
    """Metric -> this model minus the baseline, by paired bootstrap; empty without a baseline."""
    budgets: tuple[BudgetPoint, ...]


class BenchmarkResults(BlockResults):
    """Metrics of one benchmark, and how many problems and samples they rest on."""

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
    notes: tuple[str, ...] = ()
    """What a reader must know of the model, such as that it was trained on these problems."""

    @property
    def blocks(self) -> dict[str, BlockResults]:
        """The results of every benchmark, and OVERALL."""
        return {**self.benchmarks, OVERALL: self.overall}

    def size(self, block: str) -> Size:
        """Return how many problems and responses a block's metrics rest on."""
        benchmarks = [*self.benchmarks.values()]
        if block != OVERALL:
            benchmarks = [self.benchmarks[block]]
        return Size(
            problems=sum(benchmark.num_problems for benchmark in benchmarks),
            samples=sorted({benchmark.samples_per_problem for benchmark in benchmarks}),
        )


def build_results(
    name: str,
    samples: Samples,
    settings: Mapping[str, JsonValue],
    *,
    budgets: Sequence[int],
    baseline: tuple[str, Samples] | None = None,
) -> Results:
    """Return everything results.json holds.

    name: the model's, in tables and figures. budgets: ascending. baseline: its name, and samples
    of the same problems of every benchmark, any number of each.
    """
    all_draws: list[list[_Draws]] = []  # as `_block_fields` takes them, by benchmark
    all_base_draws: list[_Draws] = []
    benchmarks = {}
    for benchmark in ordered(samples):
        grid = arrange(samples[benchmark])
        counts = draw_counts(grid.num_problems, benchmark)
        draws = [measure(grid, counts)]
        draws += [measure_at(grid, budget, counts) for budget in budgets]
        all_draws.append(draws)
        base = None
        if baseline is not None:
            base_grid = arrange(baseline[1][benchmark])
            base = measure(base_grid, counts)
            all_base_draws.append(base)
            if base_grid.samples_per_problem != grid.samples_per_problem:
                del base["pass_at_n"]  # of another N: no difference
        benchmarks[benchmark] = BenchmarkResults(
            **_block_fields(draws, base, budgets),
            num_problems=grid.num_problems,
            samples_per_problem=grid.samples_per_problem,
        )
    # Benchmarks were resampled independently of each other.
    overall = _block_fields(
        [combine(of_benchmarks) for of_benchmarks in zip(*all_draws, strict=True)],
        combine(all_base_draws) if all_base_draws else None,
        budgets,
    )
    return Results(
        model=name,
        baseline=None if baseline is None else baseline[0],
        settings=dict(settings),
        benchmarks=benchmarks,
        overall=BlockResults(**overall),
    )


def _block_fields(
    draws: Sequence[_Draws], base: _Draws | None, budgets: Sequence[int]
) -> JsonObject:
    """Return the fields of `BlockResults`. draws: those of the whole responses, then those at each
    budget.
    """
    whole, *at_budgets = draws
    metrics = _estimate_all(whole)
    differences = {}
    if base is not None:
        ratios = whole["mean_tokens"] / base["mean_tokens"]
        metrics["compression_ratio"] = estimate(ratios)
        differences = _estimate_all(
            {name: whole[name] - base[name] for name in whole if name in base}
        )
    points = [
        BudgetPoint(budget=budget, metrics=_estimate_all(at_budget))
        for budget, at_budget in zip(budgets, at_budgets, strict=True)
    ]
    return {"metrics": metrics, "differences": differences, "budgets": tuple(points)}


def _estimate_all(draws: _Draws) -> dict[str, Estimate]:
    return {name: estimate(values) for name, values in draws.items()}


def paired_differences(
    pairs: Sequence[tuple[MeasuredSamples, MeasuredSamples]],
) -> dict[str, Estimate]:
    """Return accuracy and mean_tokens over all benchmarks, the first of each pair minus the second,
    as means over the pairs, by paired bootstrap: in each resample all pairs have the same problems.

    pairs: two models on the same problems, say of each seed. A pair whose problems are others than
    the first one's is left out; {} if there is none.
    """
    draws: dict[str, list[Floats]] = {"accuracy": [], "mean_tokens": []}
    for ours, theirs in pairs:
        if not ours.problems == theirs.problems == pairs[0][0].problems:
            continue
        for benchmark, ids in ours.problems.items():
            counts = draw_counts(len(ids), benchmark)
            our_values = problem_values(ours.grids[benchmark])
            their_values = problem_values(theirs.grids[benchmark])
            differences = {
                name: our_values[name] - their_values[name] for name in draws
            }
            for name, values in mean_over_problems(differences, counts).items():
                draws[name].append(values)
    # Every pair has the same benchmarks, so that this is also the mean of the pairs' own means.
    return {
        name: estimate(np.mean(values, axis=0))
        for name, values in draws.items()
        if values
    }


def to_json(results: Results) -> str:
    """Return the text of results.json."""
    tree = results.model_dump(mode="json")
    if not results.notes:
        del tree["notes"]
    tree["settings"] = json.loads(json.dumps(tree["settings"], sort_keys=True))
    return json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_results(directory: Path) -> Results:
    """Read the results of an evaluation.

    Errors: `UserError` with file and field if there are none, or they are damaged or of another
    version.
    """
    path = directory / "results.json"
    if not path.is_file():
        raise UserError(
            f"{path}: not found; `megatron-opsft eval` writes it when it ends"
        )
    try:
        return Results.model_validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        raise UserError(f"{path}: {first_fault(error, 'results')}") from None


def first_fault(error: ValidationError, whole: str) -> str:
    """Return field and reason of the first error. whole: what to call the file as a whole."""
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"])) or whole
    return f"{field}: {first['msg']}"
