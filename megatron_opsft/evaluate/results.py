"""results.json: every metric of one model with its interval, read back with validation.

The same samples in any order give the same bytes. Settings are the caller's: whatever two results
can differ by (sampling, template, data hash, engine version), but not the model itself.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.bootstrap import Bootstrap, draw_counts, estimate
from megatron_opsft.evaluate.budgets import BUDGET_METRICS, cut_is_exact, measure_at
from megatron_opsft.evaluate.metrics import (
    Counts,
    Floats,
    SampleGrid,
    ScoredSample,
    arrange,
    combine,
    compression_ratio,
    measure,
)
from megatron_opsft.report.estimate import Estimate
from megatron_opsft.runtime.durable import write_text

OVERALL = "overall"  # beside the names of benchmarks in tables and figures
SCHEMA_VERSION = 1  # as in Results
PAPER_ORDER = ("gsm8k", "math500", "amc23", "aime24", "aime25")
_NEEDED = (
    "accuracy",
    "pass_at_n",
    "mean_tokens",
    "median_tokens",
    "p95_tokens",
    "efficiency",
    "norm_std",
    "truncated_share",
    "no_answer_share",
)
_Draws = dict[str, Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSamples:
    """All samples of one model; `name` is the label of its row in tables and figures."""

    name: str
    samples: Mapping[str, Sequence[ScoredSample]]
    settings: Mapping[str, JsonValue]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _need(names: Iterable[str]) -> AfterValidator:
    def check(metrics: dict[str, Estimate]) -> dict[str, Estimate]:
        missing = [name for name in names if name not in metrics]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        return metrics

    return AfterValidator(check)


class BudgetPoint(_Record):
    """Metrics had generation stopped after `budget` tokens."""

    budget: int = Field(ge=1)
    metrics: Annotated[dict[str, Estimate], _need(BUDGET_METRICS)]


class BlockResults(_Record):
    """metrics: as in `metrics`, and compression_ratio where there is a baseline.

    differences: metric -> this model minus the baseline, by paired bootstrap; empty without one.
    """

    metrics: Annotated[dict[str, Estimate], _need(_NEEDED)]
    differences: dict[str, Estimate]
    budgets: tuple[BudgetPoint, ...]


class BenchmarkResults(BlockResults):
    """BlockResults of one benchmark, and its true size."""

    num_problems: int = Field(ge=1)
    samples_per_problem: int = Field(ge=1)


class Results(_Record):
    """The whole of results.json."""

    schema_version: Literal[1] = 1
    model: str
    baseline: str | None
    settings: dict[str, JsonValue]
    bootstrap: Bootstrap
    benchmarks: dict[str, BenchmarkResults] = Field(min_length=1)
    overall: BlockResults


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockDraws:
    """Draws [1 + R] of one benchmark or of overall: metrics, and those at each budget."""

    metrics: _Draws
    at_budget: tuple[_Draws, ...]


def ordered(benchmarks: Iterable[str]) -> list[str]:
    """The paper's benchmarks in its order, then the others by name."""
    known = {name: place for place, name in enumerate(PAPER_ORDER)}
    return sorted(benchmarks, key=lambda name: (known.get(name, len(known)), name))


def build_results(
    model: ModelSamples,
    *,
    baseline: ModelSamples | None = None,
    budgets: Sequence[int],
    bootstrap: Bootstrap | None = None,
) -> Results:
    """Everything results.json holds.

    budgets: as `check_budgets` gives them; none are kept where the method is not `cut_is_exact`.
    baseline: on the same problems of every benchmark, with
    any number of samples; it may hold more benchmarks. `UserError` where it does not fit.
    """
    bootstrap = bootstrap or Bootstrap()
    if not model.samples:
        raise UserError(f"{model.name}: there is no benchmark")
    if OVERALL in model.samples:
        raise UserError(f"benchmark {OVERALL}: that name is taken; choose another")
    if not cut_is_exact(model.settings.get("method")):
        budgets = ()
    own, base, benchmarks = [], [], {}
    for name in ordered(model.samples):
        grid = _arrange(model, name)
        counts = draw_counts(grid.num_problems, name, bootstrap)
        own.append(_draw(grid, budgets, counts))
        if baseline is not None:
            base_grid = _arrange(baseline, name)
            _check_same_problems(name, grid, base_grid)
            base.append(_draw(base_grid, (), counts))
            if base_grid.samples_per_problem != grid.samples_per_problem:
                del base[-1].metrics["pass_at_n"]  # of another N: no difference
        scores = _scores(own[-1], base[-1] if base else None, budgets, bootstrap)
        benchmarks[name] = BenchmarkResults(
            **scores, num_problems=grid.num_problems, samples_per_problem=grid.samples_per_problem
        )
    overall = _scores(_combine(own), _combine(base) if base else None, budgets, bootstrap)
    return Results(
        model=model.name,
        baseline=baseline.name if baseline is not None else None,
        settings=dict(model.settings),
        bootstrap=bootstrap,
        benchmarks=benchmarks,
        overall=BlockResults(**overall),
    )


def to_json(results: Results) -> str:
    """The text of results.json."""
    tree = results.model_dump(mode="json")
    tree["settings"] = json.loads(json.dumps(tree["settings"], sort_keys=True))
    return json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_results(path: Path, results: Results) -> None:
    """Write results.json whole or not at all."""
    write_text(path, to_json(results))


def read_results(path: Path) -> Results:
    """results.json; `UserError` with file and field where it is none, damaged or of other make."""
    path = Path(path)
    if path.is_dir():
        path = path / "results.json"
    if not path.is_file():
        raise UserError(f"{path}: not found; `megatron-opsft eval` writes it when it ends")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must hold a JSON object")
    if (version := tree.get("schema_version")) != SCHEMA_VERSION:
        raise UserError(f"{path}: schema_version is {version!r}, this version reads 1")
    try:
        return Results.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {field}: {first['msg']}") from None


def _arrange(model: ModelSamples, benchmark: str) -> SampleGrid:
    if benchmark not in model.samples:
        raise UserError(f"{model.name} has no samples of {benchmark}")
    try:
        return arrange(model.samples[benchmark])
    except ValueError as error:
        raise UserError(f"{model.name}, {benchmark}: {error}") from None


def _check_same_problems(benchmark: str, grid: SampleGrid, base: SampleGrid) -> None:
    if odd := set(grid.problem_ids) ^ set(base.problem_ids):
        raise UserError(
            f"{benchmark}: model and baseline must answer the same problems;"
            f" {len(odd)} are in one only, such as {min(odd)}"
        )


def _draw(grid: SampleGrid, budgets: Sequence[int], counts: Counts) -> _BlockDraws:
    at_budget = tuple(measure_at(grid, budget, counts) for budget in budgets)
    return _BlockDraws(metrics=measure(grid, counts), at_budget=at_budget)


def _combine(draws: Sequence[_BlockDraws]) -> _BlockDraws:
    """Overall; benchmarks were resampled independently of each other."""
    at_budget = zip(*(draw.at_budget for draw in draws), strict=True)
    return _BlockDraws(
        metrics=combine([draw.metrics for draw in draws]),
        at_budget=tuple(combine(metrics) for metrics in at_budget),
    )


def _scores(
    own: _BlockDraws, base: _BlockDraws | None, budgets: Sequence[int], bootstrap: Bootstrap
) -> dict[str, Any]:
    """The fields of `BlockResults`."""
    metrics, differences = dict(own.metrics), {}
    if base is not None:
        metrics["compression_ratio"] = compression_ratio(
            own.metrics["mean_tokens"], base.metrics["mean_tokens"]
        )
        differences = {
            name: value - base.metrics[name]
            for name, value in own.metrics.items()
            if name in base.metrics
        }
    return {
        "metrics": _estimates(metrics, bootstrap),
        "differences": _estimates(differences, bootstrap),
        "budgets": tuple(
            BudgetPoint(budget=budget, metrics=_estimates(draws, bootstrap))
            for budget, draws in zip(budgets, own.at_budget, strict=True)
        ),
    }


def _estimates(draws: _Draws, bootstrap: Bootstrap) -> dict[str, Estimate]:
    return {name: estimate(value, bootstrap.level) for name, value in draws.items()}
