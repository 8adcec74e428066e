"""Table of metrics with intervals, as terminal, Markdown, LaTeX and page show it.

A row is a model or a run; a block is a benchmark, or OVERALL for all of them. The best value of a
column is bold: values that print alike are equally good, and nothing is bold if all print alike.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import chain
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict
from tabulate import tabulate

from megatron_opsft.records import record
from megatron_opsft.runtime.formatting import count_of

OVERALL = "overall"  # the block of all benchmarks together
_TITLES = {
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
    "amc23": "AMC23",
    "aime24": "AIME24",
    "aime25": "AIME25",
    OVERALL: "Overall",
}


class Estimate(BaseModel):
    """A metric and its interval."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    value: float
    low: float | None = None
    """None, as `high`, if the value is derived from other values, not from samples."""
    high: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends of the interval; None without one."""
        if self.low is None or self.high is None:
            return None
        return self.low, self.high

    def around(self, show: Callable[[float], str]) -> str:
        """Return the interval as tables print it; "" without one. show: formats both ends."""
        if self.interval is None:
            return ""
        low, high = map(show, self.interval)
        return f"[{low}, {high}]"


class MeanOverSeeds(Estimate):
    """The mean of a metric over seeds, with their standard deviation for an interval."""

    deviation: float

    @property
    def interval(self) -> tuple[float, float]:
        """The mean minus and plus the deviation."""
        return self.value - self.deviation, self.value + self.deviation

    def around(self, show: Callable[[float], str]) -> str:
        """Return the deviation as tables print it. show: formats it."""
        return f"± {show(self.deviation)}"


Metrics = Mapping[str, Estimate]
"""Name of a metric -> its estimate."""


@record
class Size:
    """Number of problems and responses from which the metrics of a block are computed."""

    problems: int
    samples: Sequence[int]
    """Responses to each problem; several numbers if benchmarks differ."""

    def __str__(self) -> str:
        problems = count_of([self.problems], "problem")
        return f"{problems} × {count_of(self.samples, 'response')}"


@record
class TableRow:
    """A model or a run, or several runs of one name."""

    label: str
    blocks: Mapping[str, Metrics]
    """Block -> metric -> estimate; a missing metric prints as -."""
    budgets: Mapping[str, Sequence[tuple[int, Metrics]]] = field(default_factory=dict)
    """Block -> (token budget, metrics) by ascending budget; empty if none were evaluated."""
    differences: Mapping[str, Metrics] = field(default_factory=dict)
    """Block -> metric -> the row minus the table's baseline, by paired bootstrap; empty without
    one.
    """
    sizes: Mapping[str, Size] = field(default_factory=dict)
    """Block -> problems and responses of one seed."""
    seeds: int = 1
    """Number of runs whose mean the values are."""

    def size(self, block: str) -> str:
        """Return how many problems, responses and seeds a block has; "" if that is not known."""
        if block not in self.sizes:
            return ""
        text = str(self.sizes[block])
        return f"{text} × {self.seeds} seeds" if self.seeds > 1 else text


class Column(NamedTuple):
    """A metric as a column of a table."""

    metric: str
    heading: str
    higher_is_better: bool
    scale: float = 100.0
    """Printed value over stored value: 100 for a share in percent."""
    digits: int = 1
    unit: str = ""
    is_signed: bool = False
    """True for a difference: every value is written with its sign."""

    @property
    def heading_with_arrow(self) -> str:
        """The heading and an arrow: up if higher is better, otherwise down."""
        return self.heading + ("↑" if self.higher_is_better else "↓")

    def text(self, value: float) -> str:
        """Format a stored value."""
        scaled = value * self.scale
        digits = self.digits
        if self.scale == 1 and digits == 0 and abs(scaled) < 100:
            digits = 1  # of so few tokens a whole number would hide differences
        sign = "+" if self.is_signed else ""
        return f"{scaled:{sign},.{digits}f}{self.unit}"


@record
class Cell:
    """A formatted value of a table."""

    value: str
    around: str = ""
    """Its interval or deviation; "" if it has none."""
    is_best: bool = False

    def __str__(self) -> str:
        return f"{self.value} {self.around}".rstrip()


@record
class Table:
    """A table of formatted values, for a page, Markdown or LaTeX."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    num_left: int = 1
    """How many of the first columns are texts, aligned left; numbers are aligned right."""
    note: str = ""
    """How many observations the values are computed from, and what the intervals are."""

    def markdown(self) -> str:
        """Return GitHub-flavoured Markdown: caption, table and note."""
        table = _in_markdown(self.headings, self.rows, self.num_left)
        blocks = [
            f"## {escape_markdown(self.caption)}",
            table,
            escape_markdown(self.note),
        ]
        return "\n\n".join(filter(None, blocks)) + "\n"


COLUMNS = (
    Column("accuracy", "Acc", higher_is_better=True),
    Column("pass_at_n", "P@N", higher_is_better=True),
    Column("mean_tokens", "Tok", higher_is_better=False, scale=1, digits=0),
    Column("compression_ratio", "CR", higher_is_better=False, unit="%"),
    Column("efficiency", "Eff", higher_is_better=True, scale=1, digits=2),
    Column("accuracy_difference", "ΔAcc", higher_is_better=True, is_signed=True),
    Column(
        "mean_tokens_difference",
        "ΔTok",
        higher_is_better=False,
        scale=1,
        digits=0,
        is_signed=True,
    ),
)
# Column of a difference between rows -> its metric.
DIFFERENCES = {
    "accuracy_difference": "accuracy",
    "mean_tokens_difference": "mean_tokens",
}
_WITH_INTERVAL = {*DIFFERENCES, *DIFFERENCES.values()}
MORE_COLUMNS = (
    Column("norm_std", "NormStd", higher_is_better=False, scale=1, digits=3),
    Column("truncated_share", "cut off", higher_is_better=False, unit="%"),
    Column("no_answer_share", "no answer", higher_is_better=False, unit="%"),
)


def title_of(block: str) -> str:
    """Return the printed name of a benchmark or of OVERALL."""
    return _TITLES.get(block, block)


def used_columns(rows: Sequence[TableRow], columns: Iterable[Column]) -> list[Column]:
    """Return the columns for which some row has a value: CR, say, needs a baseline."""
    all_metrics = chain.from_iterable(row.blocks.values() for row in rows)
    with_values = set(chain.from_iterable(all_metrics))
    return [column for column in columns if column.metric in with_values]


def cells(
    rows: Sequence[TableRow], block: str, columns: Sequence[Column]
) -> list[list[Cell]]:
    """Return the cells of each row with intervals, the best of each column marked.

    A row that does not have the block has "-" in every column.
    """
    lines: list[list[Cell]] = [[] for _ in rows]
    for column in columns:
        estimates = [row.blocks.get(block, {}).get(column.metric) for row in rows]
        for line, cell in zip(lines, _cells_of(column, estimates), strict=True):
            line.append(cell)
    return lines


def _cells_of(column: Column, estimates: Sequence[Estimate | None]) -> Iterator[Cell]:
    """Yield the cells of a column, the best ones marked."""
    value_of_text = {
        column.text(estimate.value): estimate.value
        for estimate in estimates
        if estimate is not None
    }
    choose = max if column.higher_is_better else min
    best_text = choose(value_of_text, key=value_of_text.__getitem__, default="")
    for estimate in estimates:
        if estimate is None:
            yield Cell(value="-")
            continue
        text = column.text(estimate.value)
        # What differences refer to has none, and may be better than all of them.
        is_best = text == best_text and len(value_of_text) > 1 and not column.is_signed
        yield Cell(value=text, around=estimate.around(column.text), is_best=is_best)


def markdown_table(rows: Sequence[TableRow], blocks: Sequence[str]) -> str:
    """Return GitHub-flavoured Markdown with a line for each row and the blocks side by side. It
    ends with a line feed.
    """
    columns = used_columns(rows, COLUMNS)
    headings = ["Method"]
    lines: list[list[Cell | str]] = [[row.label] for row in rows]
    for block in blocks:
        title = title_of(block)
        headings += [f"{title} {column.heading_with_arrow}" for column in columns]
        for line, line_cells in zip(lines, cells(rows, block, columns), strict=True):
            line += line_cells
    return _in_markdown(headings, lines, num_left=1) + "\n"


def _in_markdown(
    headings: Sequence[str], lines: Sequence[Sequence[Cell | str]], num_left: int
) -> str:
    escaped_headings = list(map(escape_markdown, headings))
    texts = [list(map(_cell_in_markdown, line)) for line in lines]
    return aligned(escaped_headings, texts, num_left=num_left, style="pipe")


def aligned(
    headings: Sequence[str],
    lines: Sequence[Sequence[object]],
    *,
    num_left: int = 1,
    style: str = "simple",
) -> str:
    """Return a table of texts, the first `num_left` columns aligned left and the others right.

    style: a table format of tabulate.
    """
    alignments = ["left"] * num_left + ["right"] * (len(headings) - num_left)
    return tabulate(
        lines, headings, tablefmt=style, disable_numparse=True, colalign=alignments
    )


def text_table(rows: Sequence[TableRow], blocks: Sequence[str]) -> str:
    """Return a table for a terminal: a line for each block and row, and intervals of accuracy, mean
    tokens and their differences only.
    """
    columns = [*used_columns(rows, COLUMNS), *MORE_COLUMNS]
    lines = []
    for title, label, line_cells in _lines(rows, blocks, columns):
        texts = [title, label]
        for cell, column in zip(line_cells, columns, strict=True):
            has_interval = column.metric in _WITH_INTERVAL
            texts.append(str(cell) if has_interval else cell.value)
        lines.append(texts)
    headings = ["", "", *(column.heading for column in columns)]
    return aligned(headings, lines, num_left=2, style="plain") + "\n"


def paper_table(
    rows: Sequence[TableRow], blocks: Sequence[str], caption: str, note: str = ""
) -> Table:
    """Return the rows of `text_table` with all intervals. If there is only one block, the table
    has no column for it.
    """
    columns = used_columns(rows, (*COLUMNS, *MORE_COLUMNS))
    arrows = [column.heading_with_arrow for column in columns]
    headings = ["Benchmark", "Method", *arrows]
    lines: list[list[Cell | str]] = [
        [title, label, *line_cells]
        for title, label, line_cells in _lines(rows, blocks, columns)
    ]
    num_left = 2
    if len(blocks) == 1:
        num_left = 1
        headings = headings[1:]
        lines = [line[1:] for line in lines]
    return Table(
        caption=caption, headings=headings, rows=lines, num_left=num_left, note=note
    )


def _lines(
    rows: Sequence[TableRow], blocks: Sequence[str], columns: Sequence[Column]
) -> Iterator[tuple[str, str, list[Cell]]]:
    """Yield title, label and cells of each line of a table in which blocks stand below each other.
    The title is the block's in its first line, "" in the others.
    """
    for block in blocks:
        title = title_of(block)
        for row, line_cells in zip(rows, cells(rows, block, columns), strict=True):
            yield title, row.label, line_cells
            title = ""


def _cell_in_markdown(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return escape_markdown(cell)
    return f"**{cell}**" if cell.is_best else str(cell)


def plain_text(text: str) -> str:
    """Return the text on one line, with ? for every character that is not printable."""
    line = " ".join(text.split())
    return "".join(sign if sign.isprintable() else "?" for sign in line)


def escape_markdown(text: str) -> str:
    """Return the text with a backslash before every character that Markdown would interpret."""
    return re.sub(r"([\\|*_`<])", r"\\\1", text)
