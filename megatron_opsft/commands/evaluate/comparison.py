"""Several results side by side: rows of one table and its page, and every setting that differs.

Results of different benchmark sets are compared on the benchmarks that all share, and have no
overall values, which are over each one's own set.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from megatron_opsft.commands.evaluate.benchmarks import ordered
from megatron_opsft.commands.evaluate.metrics import FEW_PROBLEMS
from megatron_opsft.commands.evaluate.results import Results, read_results
from megatron_opsft.commands.evaluate.settings import EvaluationDirectory
from megatron_opsft.commands.report.html import MAX_MB
from megatron_opsft.commands.report.page import figures_of_rows, write_page
from megatron_opsft.commands.report.page_sections import (
    OVER_PROBLEMS,
    PageSection,
    page_section_of,
)
from megatron_opsft.commands.report.table import (
    OVERALL,
    Estimate,
    Table,
    TableRow,
    markdown_table,
    paper_table,
    text_table,
    title_of,
)
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import write_text
from megatron_opsft.runtime.owned_directory import NOT_SET, flatten

_RATIO = "compression_ratio"
_LEGEND = (
    "Acc: share of correct samples in %; P@N: share of problems with a correct one of N in %;"
    " Tok: mean response tokens; CR: Tok over that of the baseline; Eff: Acc / Tok in %."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """rows: with the shared benchmarks, and OVERALL where all are over the same ones; blocks: what
    the tables show of these. legend: what the columns are, and of how many problems and samples;
    notes: what is left out, and each setting that differs.
    """

    rows: tuple[TableRow, ...]
    blocks: tuple[str, ...]
    legend: str
    notes: tuple[str, ...]

    def markdown(self) -> str:
        """The table with intervals, what its columns are, and the settings that differ."""
        notes = "".join(f"- {note}\n" for note in self.notes)
        table = markdown_table(self.rows, self.blocks)
        return f"{table}\n{self.legend}\n\n{notes}".rstrip() + "\n"

    def text(self) -> str:
        """For a terminal: the table, and the settings that differ."""
        return text_table(self.rows, self.blocks) + "".join(
            f"{note}\n" for note in self.notes
        )

    def write(self, out: Path, evaluations: Sequence[Path]) -> None:
        """table.md and report.html of the evaluations, in `out`."""
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "table.md", self.markdown())
        self.write_page(out / "report.html", evaluations)

    def write_page(
        self,
        page: Path,
        evaluations: Sequence[Path],
        runs: Sequence[Path] = (),
        *,
        max_mb: float = MAX_MB,
    ) -> None:
        """The page of the evaluations that are compared, in their order, and of runs. Errors: as of
        `report.page.write_page`.
        """
        first, last = self.rows[0], self.rows[-1]
        has_ends = len(self.rows) > 1 and OVERALL in first.blocks and not runs
        write_page(
            page,
            runs,
            {row.label: path for row, path in zip(self.rows, evaluations, strict=True)},
            text=self._text(),
            figures=figures_of_rows(first, last, OVERALL) if has_ends else (),
            sections=self.sections(),
            max_mb=max_mb,
        )

    def sections(self) -> list[PageSection]:
        """A section for each block."""
        names = {block: block if len(self.blocks) > 1 else "" for block in self.blocks}
        return [
            page_section_of(self.rows, block, title_of(block), name=name)
            for block, name in names.items()
        ]

    def paper_table(self) -> Table:
        """The terminal's rows with all intervals."""
        caption = ", ".join(map(title_of, self.blocks))
        return paper_table(self.rows, self.blocks, caption, self._text())

    def _text(self) -> str:
        return " ".join([self.legend, *(f"{n[0].upper()}{n[1:]}." for n in self.notes)])


def compare(results: Sequence[Results], *, baseline: str | None = None) -> Comparison:
    """Rows in the order given. baseline: label of the row whose tokens are 100 % of every CR; by
    default the first row. One result alone keeps the CR that it was evaluated with. `UserError`
    where no benchmark is in all of them, or no row has the label.
    """
    shared = [
        n
        for n in ordered(results[0].benchmarks)
        if all(n in r.benchmarks for r in results)
    ]
    if not shared:
        sets = "; ".join(
            f"{r.model}: {', '.join(ordered(r.benchmarks))}" for r in results
        )
        raise UserError(
            f"the results share no benchmark, so nothing can be compared: {sets}"
        )
    same_sets = all(len(result.benchmarks) == len(shared) for result in results)
    blocks = [*shared, OVERALL] if same_sets else shared
    by_label: dict[str, Results] = {}
    for result in results:
        names = chain([result.model], (f"{result.model} ({n})" for n in count(2)))
        by_label[next(name for name in names if name not in by_label)] = result
    if baseline is not None and baseline not in by_label:
        raise UserError(f"baseline {baseline}: there are {', '.join(by_label)}")
    base, reference = None, results[0].baseline
    if len(results) > 1 or baseline is not None:
        reference = baseline or results[0].model
        base = by_label[reference]
    return Comparison(
        rows=tuple(
            _row(label, result, blocks, base) for label, result in by_label.items()
        ),
        blocks=tuple(shared if len(shared) == 1 else blocks),
        legend=_legend(
            results, shared, reference, has_overall=same_sets and len(shared) > 1
        ),
        notes=(*_left_out(by_label, shared), *_differing_settings(by_label, shared)),
    )


def with_baseline(directory: Path) -> list[Path]:
    """An evaluation, behind its baseline's where that is still there. Errors: `UserError` where it
    is none.
    """
    own = directory / "baseline"
    if read_results(directory).baseline is None:
        return [directory]
    manifest = EvaluationDirectory(directory).read_manifest() or {}
    given = Path(manifest.get("settings", {}).get("baseline") or own).expanduser()
    found = [place for place in (given, own) if (place / "results.json").is_file()]
    return [*found[:1], directory]


def _row(
    label: str, result: Results, names: Sequence[str], base: Results | None
) -> TableRow:
    """With CR against `base`; with its interval where the result was evaluated against these same
    samples.
    """
    blocks, budgets, sizes = {}, {}, {}
    for name in names:
        block = result.blocks[name]
        sizes[name] = result.size(name)
        blocks[name] = dict(block.metrics)
        budgets[name] = [(at.budget, at.metrics) for at in block.budgets]
        if base is not None:
            before = base.blocks[name].metrics["mean_tokens"].value
            ratio = block.metrics["mean_tokens"].value / before
            stored = block.metrics.get(_RATIO)
            if stored is None or not math.isclose(stored.value, ratio, rel_tol=1e-6):
                blocks[name][_RATIO] = Estimate(value=ratio)
    return TableRow(label=label, blocks=blocks, budgets=budgets, sizes=sizes)


def _size(results: Sequence[Results], name: str) -> str:
    """Such as "30 problems, N = 64"; several values where the results differ."""
    scores = [result.benchmarks[name] for result in results]
    problems = dict.fromkeys(str(score.num_problems) for score in scores)
    samples = dict.fromkeys(str(score.samples_per_problem) for score in scores)
    return f"{' / '.join(problems)} problems, N = {' / '.join(samples)}"


def _legend(
    results: Sequence[Results],
    shared: Sequence[str],
    reference: str | None,
    *,
    has_overall: bool,
) -> str:
    overall = ["Overall: plain mean over benchmarks."] if has_overall else []
    parts = [_LEGEND, *overall, f"In brackets: {OVER_PROBLEMS}."]
    fewest = min(r.benchmarks[name].num_problems for r in results for name in shared)
    if fewest < FEW_PROBLEMS:
        parts.append(
            f"They are too narrow for as few as {fewest} problems: at a nominal"
            " 95 %, about 84 % hold the true value at 5 problems and 92 % at 30."
        )
    parts.append(
        "; ".join(f"{title_of(name)}: {_size(results, name)}" for name in shared) + "."
    )
    if reference is not None:
        parts.append(f"Baseline: {reference}.")
    return " ".join(parts)


def _left_out(results: Mapping[str, Results], shared: Sequence[str]) -> Iterator[str]:
    everything = ordered(
        {name for result in results.values() for name in result.benchmarks}
    )
    if left_out := [name for name in everything if name not in shared]:
        yield f"not in all results, left out: {', '.join(left_out)}"
    if without := [
        label for label, result in results.items() if not result.overall.budgets
    ]:
        yield (
            f"no budget curve: {', '.join(without)} (early exit tries answers by the room left, so "
            "its samples do not tell what a smaller limit gives)"
        )


def _differing_settings(
    results: Mapping[str, Results], shared: Sequence[str]
) -> Iterator[str]:
    """The settings and sizes in which results differ: the values of each, and which rows have
    them.
    """
    size = {"num_problems", "samples_per_problem"}
    flat = {
        label: flatten(result.settings)
        | flatten(
            {name: result.benchmarks[name].model_dump(include=size) for name in shared}
        )
        for label, result in results.items()
    }
    for name in dict.fromkeys(name for settings in flat.values() for name in settings):
        who: dict[str, list[str]] = {}
        for label, settings in flat.items():
            who.setdefault(settings.get(name, NOT_SET), []).append(label)
        if len(who) > 1:
            values = "; ".join(
                f"{value} ({', '.join(rows)})" for value, rows in who.items()
            )
            yield f"differs: {name}: {values}"
