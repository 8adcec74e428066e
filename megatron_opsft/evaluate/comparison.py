"""Several results side by side: rows of one table, and every setting in which they differ.

Results of different benchmark sets are compared on the benchmarks that all share; their overall
values are then computed again from these, without intervals, which need the samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.bootstrap import FEW_PROBLEMS
from megatron_opsft.evaluate.budgets import cut_is_exact
from megatron_opsft.evaluate.directory import NOT_SET, flatten
from megatron_opsft.evaluate.metrics import combine
from megatron_opsft.evaluate.results import BlockResults, BudgetPoint, Results, ordered
from megatron_opsft.report.table import (
    OVERALL,
    Estimate,
    TableRow,
    markdown_table,
    text_table,
    title_of,
)

_RATIO = "compression_ratio"
_LEGEND = (
    "Acc: share of correct samples in %; P@N: share of problems with a correct one of N in %;"
    " Tok: mean response tokens; CR: Tok over that of the baseline; Eff: Acc / Tok in %."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """blocks: the shared benchmarks and OVERALL, or the one shared benchmark alone.

    sizes: benchmark -> its numbers of problems and samples, as text. legend: what the table's
    columns are; notes: lines on what is left out and on each setting that differs.
    """

    rows: tuple[TableRow, ...]
    blocks: tuple[str, ...]
    sizes: Mapping[str, str]
    legend: str
    notes: tuple[str, ...]

    def markdown(self) -> str:
        """The table with intervals, what its columns are, and the settings that differ."""
        notes = "".join(f"- {note}\n" for note in self.notes)
        table = markdown_table(self.rows, self.blocks, intervals=True)
        return f"{table}\n{self.legend}\n\n{notes}".rstrip() + "\n"

    def text(self) -> str:
        """For a terminal: the table, and the settings that differ."""
        return text_table(self.rows, self.blocks) + "".join(f"{note}\n" for note in self.notes)


def compare(results: Sequence[Results], *, baseline: str | None = None) -> Comparison:
    """One comparison, rows in the order given.

    baseline: label of the row whose tokens are 100 % of every CR; by default the first row. One
    result alone keeps the CR that it was evaluated with. `UserError` where no benchmark is in all
    of them, or no row has the label.
    """
    if not results:
        raise UserError("there is nothing to compare: name one result or more")
    shared = [n for n in ordered(results[0].benchmarks) if all(n in r.benchmarks for r in results)]
    if not shared:
        sets = "; ".join(f"{r.model}: {', '.join(ordered(r.benchmarks))}" for r in results)
        raise UserError(f"no benchmark is in all results, so nothing can be compared: {sets}")
    labels = _labels(results)
    rows = {label: _blocks(result, shared) for label, result in zip(labels, results, strict=True)}
    if baseline is not None and baseline not in rows:
        raise UserError(f"baseline {baseline}: there are {', '.join(labels)}")
    reference = results[0].baseline
    if len(results) > 1 or baseline is not None:
        reference = baseline or labels[0]
        base = rows[reference]
        rows = {label: _with_ratio(blocks, base) for label, blocks in rows.items()}
    blocks = tuple(shared) if len(shared) == 1 else (*shared, OVERALL)
    sizes = {name: _size(results, name) for name in shared}
    told = "; ".join(f"{title_of(name)}: {size}" for name, size in sizes.items())
    legend = f"{_legend(results, shared)} {told}."
    return Comparison(
        rows=tuple(
            TableRow(
                label=label,
                blocks={name: block.metrics for name, block in of_model.items()},
                budgets={
                    name: [(point.budget, point.metrics) for point in block.budgets]
                    for name, block in of_model.items()
                },
            )
            for label, of_model in rows.items()
        ),
        blocks=blocks,
        sizes=sizes,
        legend=f"{legend} Baseline: {reference}." if reference is not None else legend,
        notes=_notes(results, labels, shared),
    )


def _labels(results: Sequence[Results]) -> list[str]:
    """The models' names, each once: the second one of a name gets (2), and so on."""
    labels: list[str] = []
    for result in results:
        label, number = result.model, 1
        while label in labels:
            number += 1
            label = f"{result.model} ({number})"
        labels.append(label)
    return labels


def _blocks(result: Results, shared: Sequence[str]) -> dict[str, BlockResults]:
    """The shared benchmarks and OVERALL: the stored one where it is over the same benchmarks."""
    blocks: dict[str, BlockResults] = {name: result.benchmarks[name] for name in shared}
    if len(shared) == len(result.benchmarks):
        return blocks | {OVERALL: result.overall}
    by_budget: dict[int, list[Mapping[str, Estimate]]] = {}
    for block in blocks.values():
        for point in block.budgets:
            by_budget.setdefault(point.budget, []).append(point.metrics)
    overall = BlockResults(
        metrics=_mean([block.metrics for block in blocks.values()]),
        differences={},
        budgets=tuple(
            BudgetPoint(budget=budget, metrics=_mean(metrics))
            for budget, metrics in sorted(by_budget.items())
            if len(metrics) == len(shared)
        ),
    )
    return blocks | {OVERALL: overall}


def _mean(benchmarks: Sequence[Mapping[str, Estimate]]) -> dict[str, Estimate]:
    """Overall values from those of the benchmarks, without intervals."""
    arrays = [{n: np.array([e.value]) for n, e in metrics.items()} for metrics in benchmarks]
    return {name: Estimate(value=float(value[0])) for name, value in combine(arrays).items()}


def _with_ratio(
    own: Mapping[str, BlockResults], base: Mapping[str, BlockResults]
) -> dict[str, BlockResults]:
    """The blocks with CR against `base`; with its interval where the result was evaluated against
    these same samples.
    """
    blocks = {}
    for name, block in own.items():
        tokens = block.metrics["mean_tokens"].value
        ratio = Estimate(value=tokens / base[name].metrics["mean_tokens"].value)
        stored = block.metrics.get(_RATIO)
        if stored is not None and math.isclose(stored.value, ratio.value, rel_tol=1e-6):
            ratio = stored
        blocks[name] = block.model_copy(update={"metrics": {**block.metrics, _RATIO: ratio}})
    return blocks


def _legend(results: Sequence[Results], shared: Sequence[str]) -> str:
    overall = " Overall: plain mean over benchmarks." if len(shared) > 1 else ""
    level = 100 * results[0].bootstrap.level
    bootstrap = f" In brackets: {level:g} % intervals, bootstrap over problems."
    fewest = min(r.benchmarks[name].num_problems for r in results for name in shared)
    if fewest < FEW_PROBLEMS:
        bootstrap += (
            f" They are too narrow for so few problems as {fewest}: at a nominal"
            " 95 %, about 84 % hold the true value at 5 problems and 92 % at 30."
        )
    return _LEGEND + overall + bootstrap


def _size(results: Sequence[Results], name: str) -> str:
    """Such as "30 problems, N = 64"; several values where the results differ."""
    scores = [result.benchmarks[name] for result in results]
    problems = dict.fromkeys(str(score.num_problems) for score in scores)
    samples = dict.fromkeys(str(score.samples_per_problem) for score in scores)
    return f"{' / '.join(problems)} problems, N = {' / '.join(samples)}"


def _notes(
    results: Sequence[Results], labels: Sequence[str], shared: Sequence[str]
) -> tuple[str, ...]:
    """What is left out, and the settings, sizes and intervals' making in which results differ: the
    values of each, and which rows have them.
    """
    notes = []
    everything = ordered({name for result in results for name in result.benchmarks})
    if left_out := [name for name in everything if name not in shared]:
        notes.append(f"not in all results, left out: {', '.join(left_out)}")
    named = list(zip(labels, results, strict=True))
    if cut := [label for label, r in named if not cut_is_exact(r.settings.get("method"))]:
        notes.append(
            f"no budget curve: {', '.join(cut)} (early exit tries answers by the room left, so its "
            "samples do not tell what a smaller limit gives)"
        )
    size = {"num_problems", "samples_per_problem"}
    flat = [
        flatten(result.settings)
        | flatten({name: result.benchmarks[name].model_dump(include=size) for name in shared})
        | flatten(result.bootstrap.model_dump(), "bootstrap.")
        for result in results
    ]
    for name in dict.fromkeys(name for settings in flat for name in settings):
        who: dict[str, list[str]] = {}
        for label, settings in zip(labels, flat, strict=True):
            who.setdefault(settings.get(name, NOT_SET), []).append(label)
        if len(who) > 1:
            values = "; ".join(f"{value} ({', '.join(rows)})" for value, rows in who.items())
            notes.append(f"differs: {name}: {values}")
    return tuple(notes)
