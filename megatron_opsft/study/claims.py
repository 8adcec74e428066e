"""What a study is expected to show: statements on a section's table that hold or do not.

    tokens["On-policy SFT"] < 0.5 * tokens["CoT"] and accuracy["On-policy SFT"] == max(accuracy)

A measure of a run is its mean over seeds; `max` and `min` are over the runs of the section.
"""

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from megatron_opsft.config_section import Section

Values = dict[str, dict[str, float]]  # measure -> run -> mean over seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    """read: from a row of table.json, None where it has none; text: of a value."""

    read: Callable[[Mapping[str, Any]], float | None]
    text: Callable[[float], str]


def _field(name: str, text: Callable[[float], str]) -> _Measure:
    return _Measure(read=lambda row: row.get(name), text=text)


def _training(name: str, text: Callable[[float], str]) -> _Measure:
    return _Measure(read=lambda row: (row.get("training") or {}).get(name), text=text)


def _step_seconds(row: Mapping[str, Any]) -> float | None:
    training = row.get("training")
    return training["seconds"] / training["steps"] if training else None


_MEASURES = {
    "accuracy": _field("accuracy", lambda share: f"{100 * share:.1f} %"),
    "pass_at_n": _field("pass_at_n", lambda share: f"P@N {100 * share:.1f} %"),
    "tokens": _field("tokens", "{:.1f} tokens".format),
    "compression_ratio": _field("compression_ratio", lambda share: f"CR {100 * share:.1f} %"),
    "efficiency": _field("efficiency", "Eff {:.2f}".format),
    "norm_std": _field("norm_std", "NormStd {:.3f}".format),
    "peak_memory_bytes": _training(
        "peak_memory_bytes", lambda value: f"{value / 2**20:.0f} MiB at most"
    ),
    "converged_step": _training("converged_step", "converged at step {:.0f}".format),
    "converged_seconds": _training("converged_seconds", "after {:.0f} s".format),
    "step_seconds": _Measure(
        read=_step_seconds,
        text="{:.2f} s a step".format,
    ),
    # Of the budgets, those at which no run of the section is more accurate; filled in for all runs.
    "best_budgets": _Measure(
        read=lambda row: None, text=lambda share: f"best at {100 * share:.0f} % of the budgets"
    ),
}
_EXTREMES: dict[str, Callable[[Iterable[float]], float]] = {"max": max, "min": min}
_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Compare, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Subscript, ast.Call, ast.Constant, ast.Name,
    ast.Load,
)  # fmt: skip


def _checked(text: str) -> str:
    """Errors: `ValueError` for anything but comparisons of measures."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{text!r}: {error.msg}") from None
    places = set()
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise ValueError(f"{text!r}: no {type(node).__name__} in a claim")
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            places.add(node.value)
            if not isinstance(node.slice, ast.Constant) or not isinstance(node.slice.value, str):
                raise ValueError(f"{text!r}: write a run as {node.value.id}['name']")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id not in _EXTREMES or len(node.args) != 1 or node.keywords:
                raise ValueError(f"{text!r}: write max(tokens) or min(tokens)")
            places |= {node.func, *(arg for arg in node.args if isinstance(arg, ast.Name))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and (
            node not in places or node.id not in {*_MEASURES, *_EXTREMES}
        ):
            raise ValueError(f"{text!r}: {node.id} is no measure ({', '.join(_MEASURES)}) of a run")
    if not isinstance(tree.body, ast.Compare | ast.BoolOp):
        raise ValueError(f"{text!r}: a claim compares measures")
    return text


class Claim(Section):
    """One statement, beside what is reported elsewhere."""

    what: str = Field(..., description="The statement in words.")
    paper: str = Field("", description="What is reported elsewhere.")
    holds: Annotated[str, AfterValidator(_checked)] = Field(
        ..., description="When it holds: comparisons, joined by `and`."
    )

    def runs(self) -> list[str]:
        """Whose measures it compares, in its order."""
        return list(dict.fromkeys(one.run for one in _references(self.holds) if one.run))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """found: the measures that decide; holds: None where a run has none."""

    claim: Claim
    found: str
    holds: bool | None


def judge(claim: Claim, rows: Sequence[Mapping[str, Any]]) -> Judgement:
    """rows: those of table.json of the claim's section."""
    values = _values(rows)
    references = _references(claim.holds)
    for one in references:
        of_runs = values[one.measure]
        if not of_runs or (one.run and one.run not in of_runs):
            missing = one.run or one.measure
            return Judgement(claim=claim, found=f"not made: {missing}", holds=None)
    names: dict[str, Any] = {"__builtins__": {}, **values}
    for name, extreme in _EXTREMES.items():
        names[name] = lambda of_runs, extreme=extreme: extreme(of_runs.values())
    holds = bool(eval(claim.holds, names))  # `_checked` has let nothing but arithmetic pass
    return Judgement(claim=claim, found=_found(references, values), holds=holds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """A measure of a run, or its max or min over all."""

    measure: str
    run: str = ""
    extreme: str = ""


def _references(holds: str) -> list[_Reference]:
    """In the order of the text."""
    found = {}
    for node in ast.walk(ast.parse(holds, mode="eval")):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            measure, run = ast.unparse(node.value), str(node.slice.value)
            found[node.col_offset] = _Reference(measure=measure, run=run)
        elif isinstance(node, ast.Call):
            measure, extreme = ast.unparse(node.args[0]), ast.unparse(node.func)
            found[node.col_offset] = _Reference(measure=measure, extreme=extreme)
    return list(dict.fromkeys(found[place] for place in sorted(found)))


def _found(references: Sequence[_Reference], values: Values) -> str:
    """Each run's measures; for an extreme, the three runs nearest to it."""
    by_run: dict[str, list[str]] = {}
    extremes = []
    for one in references:
        of_runs, text = values[one.measure], _MEASURES[one.measure].text
        if one.run:
            by_run.setdefault(one.run, []).append(text(of_runs[one.run]))
        else:
            ranked = sorted(of_runs, key=of_runs.__getitem__, reverse=one.extreme == "max")
            first = ", ".join(f"{name} {text(of_runs[name])}" for name in ranked[:3])
            extremes.append(f"first of {len(ranked)}: {first}")
    return "; ".join([*(f"{run}: {', '.join(texts)}" for run, texts in by_run.items()), *extremes])


def _values(rows: Sequence[Mapping[str, Any]]) -> Values:
    """Of the runs that ended; a run has a measure if all its seeds have it."""
    names = list(dict.fromkeys(row["name"] for row in rows if row["error"] is None))
    found: Values = {measure: {} for measure in _MEASURES}
    for name in names:
        own = [row for row in rows if row["name"] == name and row["error"] is None]
        for measure, kind in _MEASURES.items():
            read = [value for row in own if (value := kind.read(row)) is not None]
            if len(read) == len(own):
                found[measure][name] = fmean(read)
    found["best_budgets"] = _best_budgets(rows)
    return found


def _best_budgets(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of first seeds: run -> share of its budgets at which no run is more accurate."""
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["error"] is None and row.get("budgets"):
            curve = {point["budget"]: point["accuracy"] for point in row["budgets"]}
            curves.setdefault(row["name"], curve)
    return {
        name: fmean(
            all(accuracy >= other.get(budget, 0.0) for other in curves.values())
            for budget, accuracy in curve.items()
        )
        for name, curve in curves.items()
    }
