"""Several results side by side: rows of one table, and every setting in which they differ.

Results of different benchmark sets are compared on the benchmarks that all share; their overall
values are then computed again from these, without intervals, which need the samples.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from pydantic import JsonValue

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.bootstrap import FEW_PROBLEMS
from megatron_opsft.evaluate.budgets import cut_is_exact
from megatron_opsft.evaluate.metrics import combine
from megatron_opsft.evaluate.references import chosen_references, own_references, row_labels
from megatron_opsft.evaluate.results import Results, ordered
from megatron_opsft.report.estimate import Estimate
from megatron_opsft.report.table import OVERALL, TableRow, markdown_table, text_table, title_of

NOT_SET = "(not set)"
_RATIO = "compression_ratio"
_Blocks = dict[str, Mapping[str, Estimate]]
_LEGEND = (
    "Acc: share of correct samples in %; P@N: share of problems with a correct one of N in %;"
    " Tok: mean response tokens; CR: Tok over that of the baseline; Eff: Acc / Tok in %."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """values: one per row of the comparison, as JSON, or NOT_SET."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """blocks: the shared benchmarks and OVERALL, or the one shared benchmark alone.

    left_out: benchmarks that some results have and others do not. without_curve: rows whose method
    is not `cut_is_exact`. sizes: benchmark -> its numbers of problems and samples, as text.
    fewest_problems: of any benchmark. level: of the intervals.
    """

    rows: tuple[TableRow, ...]
    blocks: tuple[str, ...]
    left_out: tuple[str, ...]
    differences: tuple[SettingDifference, ...]
    without_curve: tuple[str, ...]
    sizes: Mapping[str, str]
    fewest_problems: int
    level: float

    def markdown(self, *, intervals: bool = False) -> str:
        """The table, what its columns are, and the settings that differ."""
        sizes = "; ".join(f"{title_of(name)}: {size}" for name, size in self.sizes.items())
        table = markdown_table(self.rows, self.blocks, intervals=intervals)
        lines = [table, f"{self._legend(intervals)} {sizes}."]
        if names := dict.fromkeys(row.reference for row in self.rows if row.reference is not None):
            lines[-1] += f" Baseline: {', '.join(names)}."
        if self.left_out:
            lines.append(f"\nNot in all results, left out: {', '.join(self.left_out)}.")
        if self.without_curve:
            lines.append(f"\n{self.describe_curves()}")
        if self.differences:
            lines.append("\nSettings that differ:\n")
            lines += [f"- {line}" for line in self.describe_differences()]
        return "\n".join(lines) + "\n"

    def text(self) -> str:
        """For a terminal: the table, and the settings that differ."""
        lines = [text_table(self.rows, self.blocks)]
        shown = [row.label for row in self.rows]
        hidden = dict.fromkeys(row.reference for row in self.rows if row.reference not in shown)
        lines += [f"CR: to the tokens of {name}, which has no row\n" for name in hidden if name]
        lines += [f"{self.describe_curves()}\n"] if self.without_curve else []
        lines += [f"differs: {line}\n" for line in self.describe_differences()]
        return "".join(lines)

    def _legend(self, intervals: bool) -> str:
        overall = " Overall: plain mean over benchmarks." if OVERALL in self.blocks else ""
        bootstrap = f" In brackets: {100 * self.level:g} % intervals, bootstrap over problems."
        if self.fewest_problems < FEW_PROBLEMS:
            bootstrap += (
                f" They are too narrow for so few problems as {self.fewest_problems}: at a nominal"
                " 95 %, about 84 % hold the true value at 5 problems and 92 % at 30."
            )
        return _LEGEND + overall + (bootstrap if intervals else "")

    def describe_curves(self) -> str:
        """Which rows have no budget curve, and why."""
        return (
            f"No budget curve: {', '.join(self.without_curve)} (early exit tries answers by the "
            "room left, so its samples do not tell what a smaller limit gives)."
        )

    def describe_differences(self) -> list[str]:
        """One line per setting: its values, and which rows have each."""
        lines = []
        for difference in self.differences:
            groups: dict[str, list[str]] = {}
            for row, value in zip(self.rows, difference.values, strict=True):
                groups.setdefault(value, []).append(row.label)
            shown = "; ".join(f"{value} ({', '.join(who)})" for value, who in groups.items())
            lines.append(f"{difference.name}: {shown}")
        return lines


def compare(results: Sequence[Results], *, baseline: str | None = None) -> Comparison:
    """One comparison, rows in the order given.

    baseline: the model that every row's CR refers to; by default as in `chosen_references`.
    `UserError` where no benchmark is in all of them.
    """
    if not results:
        raise UserError("there is nothing to compare: name one result or more")
    shared = [n for n in ordered(results[0].benchmarks) if all(n in r.benchmarks for r in results)]
    if not shared:
        sets = "; ".join(f"{r.model}: {', '.join(ordered(r.benchmarks))}" for r in results)
        raise UserError(f"no benchmark is in all results, so nothing can be compared: {sets}")
    everything = ordered({name for result in results for name in result.benchmarks})
    blocks = [_metrics(result, shared) for result in results]
    references = chosen_references(results, baseline)
    labels, own_baselines = row_labels(results), own_references(results)
    rows = []
    for place, (result, reference) in enumerate(zip(results, references, strict=True)):
        if reference is not None and reference == own_baselines[place]:
            with_ratio = _with_stored_ratio(blocks[place])
        else:
            row = None if reference is None else reference.row
            with_ratio = _with_ratio(blocks[place], None if row is None else blocks[row])
        rows.append(
            TableRow(
                label=labels[place],
                blocks=with_ratio,
                budgets=_budgets(result, shared),
                reference=None if reference is None else reference.label,
            )
        )
    return Comparison(
        rows=tuple(rows),
        blocks=tuple(shared) if len(shared) == 1 else (*shared, OVERALL),
        left_out=tuple(name for name in everything if name not in shared),
        differences=tuple(_differences(results, shared)),
        without_curve=tuple(
            label
            for label, result in zip(labels, results, strict=True)
            if not cut_is_exact(result.settings.get("method"))
        ),
        sizes={name: _size(results, name) for name in shared},
        fewest_problems=min(r.benchmarks[name].num_problems for r in results for name in shared),
        level=results[0].bootstrap.level,
    )


def _metrics(result: Results, shared: Sequence[str]) -> _Blocks:
    """Block -> metric -> estimate; overall is the stored one where it is over the same set."""
    blocks: _Blocks = {name: result.benchmarks[name].metrics for name in shared}
    whole = len(shared) == len(result.benchmarks)
    return blocks | {OVERALL: result.overall.metrics if whole else _mean(list(blocks.values()))}


def _budgets(
    result: Results, shared: Sequence[str]
) -> dict[str, list[tuple[int, Mapping[str, Estimate]]]]:
    if not cut_is_exact(result.settings.get("method")):  # an earlier version stored some
        return {name: [] for name in (*shared, OVERALL)}
    blocks = {name: result.benchmarks[name] for name in shared} | {OVERALL: result.overall}
    found: dict[str, list[tuple[int, Mapping[str, Estimate]]]] = {
        name: [(point.budget, point.metrics) for point in block.budgets]
        for name, block in blocks.items()
    }
    if len(shared) == len(result.benchmarks):
        return found
    by_budget: dict[int, list[Mapping[str, Estimate]]] = {}
    for name in shared:
        for budget, metrics in found[name]:
            by_budget.setdefault(budget, []).append(metrics)
    found[OVERALL] = [
        (budget, _mean(metrics))
        for budget, metrics in sorted(by_budget.items())
        if len(metrics) == len(shared)
    ]
    return found


def _mean(benchmarks: Sequence[Mapping[str, Estimate]]) -> dict[str, Estimate]:
    """Overall values from those of the benchmarks, without intervals."""
    arrays = [{n: np.array([e.value]) for n, e in metrics.items()} for metrics in benchmarks]
    return {name: Estimate(value=float(value[0])) for name, value in combine(arrays).items()}


def _with_stored_ratio(own: _Blocks) -> _Blocks:
    """The blocks with the CR of their result, which is to the baseline that it was made with,
    whether or not that one has a row. Overall values of some benchmarks have none: it is that of
    the mean tokens, which the benchmarks' ratios give.
    """
    ratios = {b: metrics[_RATIO] for b, metrics in own.items() if _RATIO in metrics}
    if OVERALL in ratios or len(ratios) < len(own) - 1:
        return own
    tokens = {name: own[name]["mean_tokens"].value for name in ratios}
    base = fmean(tokens[name] / ratio.value for name, ratio in ratios.items())
    return own | {OVERALL: {**own[OVERALL], _RATIO: Estimate(value=fmean(tokens.values()) / base)}}


def _with_ratio(own: _Blocks, reference: _Blocks | None) -> _Blocks:
    """The blocks with CR against the blocks of `reference`, without any where it has no row."""
    blocks: _Blocks = {}
    for block, metrics in own.items():
        blocks[block] = {name: value for name, value in metrics.items() if name != _RATIO}
        if reference is not None:
            ratio = metrics["mean_tokens"].value / reference[block]["mean_tokens"].value
            blocks[block] = {**blocks[block], _RATIO: Estimate(value=ratio)}
    return blocks


def _size(results: Sequence[Results], name: str) -> str:
    """Such as "30 problems, N = 64"; several values where the results differ."""
    scores = [result.benchmarks[name] for result in results]
    problems = dict.fromkeys(str(score.num_problems) for score in scores)
    samples = dict.fromkeys(str(score.samples_per_problem) for score in scores)
    return f"{' / '.join(problems)} problems, N = {' / '.join(samples)}"


def _differences(results: Sequence[Results], shared: Sequence[str]) -> list[SettingDifference]:
    """Settings, sizes of the shared benchmarks and the making of intervals, where they differ."""
    flat = []
    for result in results:
        sizes: dict[str, JsonValue] = {
            name: {
                "num_problems": result.benchmarks[name].num_problems,
                "samples_per_problem": result.benchmarks[name].samples_per_problem,
            }
            for name in shared
        }
        flat.append(
            _flatten("", result.settings)
            | _flatten("", sizes)
            | _flatten("bootstrap.", result.bootstrap.model_dump())
        )
    names = dict.fromkeys(name for settings in flat for name in settings)
    found = []
    for name in names:
        values = tuple(settings.get(name, NOT_SET) for settings in flat)
        if len(set(values)) > 1:
            found.append(SettingDifference(name=name, values=values))
    return found


def _flatten(prefix: str, tree: Mapping[str, JsonValue]) -> dict[str, str]:
    """Dotted name -> JSON of the value."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(f"{prefix}{key}.", value)
        else:
            flat[prefix + key] = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return flat
