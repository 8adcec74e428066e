"""Several results side by side: rows of one table and its page, and every setting that differs.

Results of different benchmark sets are compared on the benchmarks that all of them have. Then there
are no overall values, since each result's are means over its own benchmarks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from megatron_opsft.commands.evaluate.benchmarks import ordered
from megatron_opsft.commands.evaluate.metrics import FEW_PROBLEMS
from megatron_opsft.commands.evaluate.results import Results, read_results
from megatron_opsft.commands.evaluate.settings import EvaluationDirectory
from megatron_opsft.commands.report.html import MAX_MB
from megatron_opsft.commands.report.page import changes_between_rows, write_page
from megatron_opsft.commands.report.page_sections import (
    OVER_PROBLEMS,
    PageSection,
    page_section_of,
    warn_of_limit,
)
from megatron_opsft.commands.report.runs import Change
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
from megatron_opsft.errors import UserError, plural
from megatron_opsft.records import record
from megatron_opsft.runtime.durable import write_text
from megatron_opsft.runtime.owned_directory import NOT_SET, flatten

_RATIO = "compression_ratio"
_LEGEND = (
    "Acc: share of correct samples in %; P@N: share of problems with a correct one of N in %;"
    " Tok: mean response tokens; CR: Tok over that of the baseline; Eff: Acc / Tok in %."
)


@record
class Comparison:
    """A table of results, a row for each, with what a reader must know of them."""

    rows: tuple[TableRow, ...]
    """Rows with the shared benchmarks, and with OVERALL if all results have the same benchmarks."""
    blocks: tuple[str, ...]
    """The blocks of the rows that the tables show."""
    legend: str
    """What the columns mean, and of how many problems and samples the values are."""
    notes: tuple[str, ...]
    """What the results say of themselves, what is left out, and each setting that differs."""
    warning: str = ""
    """Which benchmarks had different problems, and which models the token limit cut off."""

    def markdown(self) -> str:
        """Return the table with intervals, the legend, the notes and the warning."""
        notes = "".join(f"- {note}\n" for note in self.notes)
        table = markdown_table(self.rows, self.blocks)
        text = f"{table}\n{self.legend}\n\n{notes}".rstrip() + "\n"
        return f"{text}\n**{self.warning}**\n" if self.warning else text

    def text(self) -> str:
        """Return the table, the notes and the warning for a terminal."""
        text = text_table(self.rows, self.blocks)
        text += "".join(f"{note}\n" for note in self.notes)
        return f"{text}WARNING {self.warning}\n" if self.warning else text

    def write(self, out: Path, evaluations: Sequence[Path]) -> None:
        """Write table.md and report.html of the evaluations to the directory `out`."""
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
        """Write the page of the compared evaluations and, if there are any, of training runs.

        evaluations: directories, in the order of the rows. runs: directories. Errors: as of
        `report.page.write_page`.
        """
        changes: list[Change] = []
        first, last = self.rows[0], self.rows[-1]
        # At the top of the page: from the first model to the last one. If there are runs,
        # `write_page` shows what a single run changed.
        if not runs and last is not first and OVERALL in first.blocks:
            changes = changes_between_rows(first, last, OVERALL)
        labels = [row.label for row in self.rows]
        write_page(
            page,
            runs,
            dict(zip(labels, evaluations, strict=True)),
            warning=self.warning,
            legend=self._text(),
            figures=changes,
            sections=self.sections(),
            max_mb=max_mb,
        )

    def sections(self) -> list[PageSection]:
        """Return a section for each block."""
        is_only = len(self.blocks) == 1
        return [
            page_section_of(
                self.rows, block, title_of(block), name="" if is_only else block
            )
            for block in self.blocks
        ]

    def paper_table(self) -> Table:
        """Return the terminal's rows with all intervals."""
        caption = ", ".join(map(title_of, self.blocks))
        note = f"{self._text()} {self.warning}".rstrip()
        return paper_table(self.rows, self.blocks, caption, note)

    def _text(self) -> str:
        """Return legend and notes as sentences."""
        sentences = [f"{note[0].upper()}{note[1:]}." for note in self.notes]
        return " ".join([self.legend, *sentences])


def compare(results: Sequence[Results], *, baseline: str | None = None) -> Comparison:
    """Compare results side by side, in the given order.

    baseline: label of the row whose tokens are 100 % of every CR; by default the first row. One
    result alone keeps the CR that it was evaluated with. Errors: `UserError` if no benchmark is in
    all of them, or no row has the label.
    """
    shared = ordered(set.intersection(*(set(result.benchmarks) for result in results)))
    if not shared:
        sets = "; ".join(
            f"{result.model}: {', '.join(ordered(result.benchmarks))}"
            for result in results
        )
        raise UserError(
            f"the results share no benchmark, so nothing can be compared: {sets}"
        )
    by_label = _by_label(results)
    if baseline is not None and baseline not in by_label:
        raise UserError(f"baseline {baseline}: there are {', '.join(by_label)}")
    if len(results) == 1 and baseline is None:
        base_name = results[0].baseline
        base = None  # the stored CR stays
    else:
        base_name = baseline or results[0].model
        base = by_label[base_name]
    blocks = shared
    all_have_the_same = all(len(result.benchmarks) == len(shared) for result in results)
    if all_have_the_same:
        blocks = [*shared, OVERALL]
    # The overall values of a single benchmark would repeat it.
    shown = shared if len(shared) == 1 else blocks
    rows = [_table_row(name, by_label[name], blocks, base) for name in by_label]
    warnings = [_warn_of_problems(results, shared), warn_of_limit(rows, shared)]
    return Comparison(
        rows=tuple(rows),
        blocks=tuple(shown),
        legend=_legend(results, shared, base_name, has_overall=OVERALL in shown),
        notes=(
            *dict.fromkeys(chain.from_iterable(result.notes for result in results)),
            *_notes_on_left_out(by_label, shared),
            *_notes_on_differences(by_label, shared),
        ),
        warning=" ".join(filter(None, warnings)),
    )


def _warn_of_problems(results: Sequence[Results], shared: Sequence[str]) -> str:
    """Say on which benchmarks the results are of different problems; "" if on none."""
    differing = []
    for name in shared:
        problems = set()
        for result in results:
            data = result.settings.get("data")
            data_hash = data.get(name) if isinstance(data, dict) else None
            problems.add((str(data_hash), result.benchmarks[name].num_problems))
        if len(problems) > 1:
            differing.append(title_of(name))
    if not differing:
        return ""
    return (
        f"Do not compare these models on {', '.join(differing)}: their problems differ."
    )


def _by_label(results: Sequence[Results]) -> dict[str, Results]:
    """Return label -> result: the model's name, with a number if an earlier result has the name."""
    by_label: dict[str, Results] = {}
    for result in results:
        label = result.model
        number = 2
        while label in by_label:
            label = f"{result.model} ({number})"
            number += 1
        by_label[label] = result
    return by_label


def compare_directories(
    directories: Sequence[Path], *, baseline: str | None = None
) -> tuple[Comparison, Sequence[Path]]:
    """Compare evaluations; one alone is compared with its baseline, if that is still there.

    Returns also the directories, in the order of the rows. Errors: `UserError` for a directory that
    is no evaluation, and as of `compare`.
    """
    if len(directories) == 1:
        directories = _with_baseline(directories[0])
    results = [read_results(directory) for directory in directories]
    return compare(results, baseline=baseline), directories


def _with_baseline(directory: Path) -> list[Path]:
    """Return the directories of an evaluation's baseline, if that is still there, and of itself.

    The baseline is an earlier evaluation, named in the settings, or was evaluated in a directory
    below.
    """
    if read_results(directory).baseline is None:
        return [directory]
    below = directory / "baseline"
    manifest = EvaluationDirectory(directory).read_manifest() or {}
    setting = manifest.get("settings", {}).get("baseline")
    for baseline in (Path(setting or below).expanduser(), below):
        if (baseline / "results.json").is_file():
            return [baseline, directory]
    return [directory]


def _table_row(
    label: str, result: Results, names: Sequence[str], base: Results | None
) -> TableRow:
    """Return the blocks `names` of a result, with CR against `base`; None: with the stored CR.

    A stored CR is the only one that has an interval.
    """
    blocks = {}
    budgets = {}
    differences = {}
    sizes = {}
    for name in names:
        block = result.blocks[name]
        sizes[name] = result.size(name)
        blocks[name] = dict(block.metrics)
        budgets[name] = [(point.budget, point.metrics) for point in block.budgets]
        if base is not None:
            base_tokens = base.blocks[name].metrics["mean_tokens"].value
            ratio = block.metrics["mean_tokens"].value / base_tokens
            stored = block.metrics.get(_RATIO)
            # An equal stored CR was measured against the samples of `base`.
            if stored is None or not math.isclose(stored.value, ratio, rel_tol=1e-6):
                blocks[name][_RATIO] = Estimate(value=ratio)
            else:
                differences[name] = block.differences
    return TableRow(
        label=label,
        blocks=blocks,
        budgets=budgets,
        differences=differences,
        sizes=sizes,
    )


def _describe_size(results: Sequence[Results], name: str) -> str:
    """Return a benchmark's size, such as "30 problems, N = 64"; "30 / 20 problems, N = 64" if the
    results differ.
    """
    benchmarks = [result.benchmarks[name] for result in results]
    problems = dict.fromkeys(str(block.num_problems) for block in benchmarks)
    samples = dict.fromkeys(str(block.samples_per_problem) for block in benchmarks)
    noun = plural("problem", *(block.num_problems for block in benchmarks))
    return f"{' / '.join(problems)} {noun}, N = {' / '.join(samples)}"


def _legend(
    results: Sequence[Results],
    shared: Sequence[str],
    base_name: str | None,
    *,
    has_overall: bool,
) -> str:
    """Say what the columns and brackets mean, and of how many problems and samples the values are.

    base_name: the name of the baseline, if there is one.
    """
    sentences = [_LEGEND]
    if has_overall:
        sentences.append("Overall: plain mean over benchmarks.")
    sentences.append(f"In brackets: {OVER_PROBLEMS}.")
    fewest = min(
        result.benchmarks[name].num_problems for result in results for name in shared
    )
    if fewest < FEW_PROBLEMS:
        sentences.append(
            f"They are too narrow for as few as {fewest} {plural('problem', fewest)}: at a nominal"
            " 95 %, about 84 % hold the true value at 5 problems and 92 % at 30."
        )
    sizes = [f"{title_of(name)}: {_describe_size(results, name)}" for name in shared]
    sentences.append("; ".join(sizes) + ".")
    if base_name is not None:
        sentences.append(f"Baseline: {base_name}.")
    return " ".join(sentences)


def _notes_on_left_out(
    results: Mapping[str, Results], shared: Sequence[str]
) -> Iterator[str]:
    """Yield notes on benchmarks and budget curves that the tables lack. results: by label."""
    names = set(chain.from_iterable(result.benchmarks for result in results.values()))
    if left_out := ordered(names.difference(shared)):
        yield f"not in all results, left out: {', '.join(left_out)}"
    without_budgets = [
        label for label, result in results.items() if not result.overall.budgets
    ]
    if without_budgets:
        yield (
            f"no budget curve: {', '.join(without_budgets)} (early exit tries answers by the room "
            "left, so its samples do not tell what a smaller limit gives)"
        )


def _notes_on_differences(
    results: Mapping[str, Results], shared: Sequence[str]
) -> Iterator[str]:
    """Yield a note on each setting or size in which results differ: its values, and the labels of
    the results with each value.
    """
    settings_by_label = {}
    for label, result in results.items():
        sizes = {
            name: result.benchmarks[name].model_dump(
                include={"num_problems", "samples_per_problem"}
            )
            for name in shared
        }
        settings_by_label[label] = flatten(result.settings) | flatten(sizes)
    for name in dict.fromkeys(chain.from_iterable(settings_by_label.values())):
        labels_by_value: dict[str, list[str]] = {}
        for label, settings in settings_by_label.items():
            value = settings.get(name, NOT_SET)
            labels_by_value.setdefault(value, []).append(label)
        if len(labels_by_value) > 1:
            values = [
                f"{value} ({', '.join(labels)})"
                for value, labels in labels_by_value.items()
            ]
            yield f"differs: {name}: {'; '.join(values)}"
