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
    Floats,
    SampleGrid,
    ScoredSample,
    arrange,
    combine,
    compression_ratio,
    measure,
)
from megatron_opsft.report.table import OVERALL, Estimate
from megatron_opsft.runtime.durable import write_text

PAPER_ORDER = ("gsm8k", "math500", "amc23", "aime24", "aime25")
_NEEDED = (
    "accuracy",
    "pass_at_n",
    "mean_tokens",
    "median_tokens",
    "p95_tokens",
    "efficiency",
    "truncated_share",
    "no_answer_share",
)
_Draws = dict[str, Floats]  # metric -> [1 + R]
_Limited = dict[int | None, _Draws]  # token budget, None for the samples as they are -> draws


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
    """metrics: as in `metrics`, and compression_ratio where there is a baseline; no norm_std of a
    single sample.

    differences: metric -> this model minus the baseline, by paired bootstrap; empty without one.
    """

    metrics: Annotated[dict[str, Estimate], _need(_NEEDED)]
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
    bootstrap: Bootstrap
    benchmarks: dict[str, BenchmarkResults] = Field(min_length=1)
    overall: BlockResults


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
    baseline: on the same problems of every benchmark, with any number of samples; it may hold more
    benchmarks. `UserError` where it does not fit.
    """
    bootstrap = bootstrap or Bootstrap()
    if not model.samples:
        raise UserError(f"{model.name}: there is no benchmark")
    if OVERALL in model.samples:
        raise UserError(f"benchmark {OVERALL}: that name is taken; choose another")
    if not cut_is_exact(model.settings.get("method")):
        budgets = ()
    own: list[_Limited] = []
    base: list[_Draws] = []
    benchmarks = {}
    for name in ordered(model.samples):
        grid = _arrange(model, name)
        counts = draw_counts(grid.num_problems, name, bootstrap)
        own.append(
            {
                limit: measure(grid, counts) if limit is None else measure_at(grid, limit, counts)
                for limit in (None, *budgets)
            }
        )
        if baseline is not None:
            base_grid = _arrange(baseline, name)
            _check_same_problems(name, grid, base_grid)
            base.append(measure(base_grid, counts))
            if base_grid.samples_per_problem != grid.samples_per_problem:
                del base[-1]["pass_at_n"]  # of another N: no difference
        benchmarks[name] = BenchmarkResults(
            **_estimated(own[-1], base[-1] if base else None, bootstrap.level),
            num_problems=grid.num_problems,
            samples_per_problem=grid.samples_per_problem,
        )
    # Benchmarks were resampled independently of each other.
    overall = {limit: combine([draws[limit] for draws in own]) for limit in own[0]}
    return Results(
        model=model.name,
        baseline=baseline.name if baseline is not None else None,
        settings=dict(model.settings),
        bootstrap=bootstrap,
        benchmarks=benchmarks,
        overall=BlockResults(
            **_estimated(overall, combine(base) if base else None, bootstrap.level)
        ),
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
        return Results.model_validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "results"
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


def _estimated(own: _Limited, base: _Draws | None, level: float) -> dict[str, Any]:
    """The fields of `BlockResults`."""
    found = {
        limit: {name: estimate(value, level) for name, value in draws.items()}
        for limit, draws in own.items()
    }
    metrics, differences = found.pop(None), {}
    if base is not None:
        ratio = compression_ratio(own[None]["mean_tokens"], base["mean_tokens"])
        metrics["compression_ratio"] = estimate(ratio, level)
        differences = {
            name: estimate(value - base[name], level)
            for name, value in own[None].items()
            if name in base
        }
    points = [BudgetPoint(budget=limit, metrics=at) for limit, at in found.items() if limit]
    return {"metrics": metrics, "differences": differences, "budgets": tuple(points)}
