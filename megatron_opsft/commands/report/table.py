"""One table of rows, blocks and metrics with intervals: terminal, Markdown and page draw from it.

A row is a model or a run, a block a benchmark or all of them (OVERALL). In Markdown the best value
of a column is bold; values that print alike are equally good, and nothing is bold where all do.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict
from tabulate import tabulate

OVERALL = "overall"  # beside the names of benchmarks
_TITLES = {
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
    "amc23": "AMC23",
    "aime24": "AIME24",
    "aime25": "AIME25",
    OVERALL: "Overall",
}


class Estimate(BaseModel):
    """A metric and its interval; None where a value was derived from others without samples."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    value: float
    low: float | None = None
    high: float | None = None


Metrics = Mapping[str, Estimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What the metrics of a block rest on."""

    problems: int
    samples: Sequence[int]
    """Responses to each problem; several numbers where benchmarks differ."""

    def __str__(self) -> str:
        samples = "–".join(
            f"{n:,}" for n in dict.fromkeys((min(self.samples), max(self.samples)))
        )
        return f"{self.problems:,} problems × {samples} responses"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A model or a run, or several runs of one name."""

    label: str
    blocks: Mapping[str, Metrics]
    """Block -> metric -> estimate; a metric that is absent prints as -."""
    budgets: Mapping[str, Sequence[tuple[int, Metrics]]] = field(default_factory=dict)
    """Block -> (token budget, metrics) ascending; empty without a curve."""
    deviations: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Block -> metric -> standard deviation of several seeds, printed in place of the interval."""
    budget_deviations: Mapping[str, Sequence[Mapping[str, float]]] = field(
        default_factory=dict
    )
    """Block -> the deviations at each token budget, in the order of `budgets`."""
    sizes: Mapping[str, Size] = field(default_factory=dict)
    """Block -> problems and responses of one seed."""
    seeds: int = 1
    """How many runs the values are means of."""

    def size(self, block: str) -> str:
        """What its values in a block rest on; "" where that is not known."""
        if block not in self.sizes:
            return ""
        return (
            f"{self.sizes[block]}{f' × {self.seeds} seeds' if self.seeds > 1 else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """unit: printed behind the value; scale: from the stored to the printed unit."""

    metric: str
    heading: str
    higher_is_better: bool
    scale: float = 100.0
    digits: int = 1
    unit: str = ""

    @property
    def titled(self) -> str:
        """The heading with an arrow to the better values."""
        return f"{self.heading}{'↑' if self.higher_is_better else '↓'}"

    def text(self, value: float) -> str:
        """A value as it is printed."""
        scaled = value * self.scale
        # Tokens are whole numbers but where these would hide a difference: small models are brief.
        digits = 1 if self.metric == "mean_tokens" and scaled < 100 else self.digits
        return f"{scaled:,.{digits}f}{self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """value: as printed; around: its interval or deviation, "" without one."""

    value: str
    around: str = ""
    is_best: bool = False

    def __str__(self) -> str:
        return f"{self.value} {self.around}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as it stands in a page, in Markdown and in LaTeX."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    num_left: int = 1
    """Columns, from the first, whose texts stand left; numbers stand right."""
    note: str = ""
    """What its values rest on, and what stands around them."""

    def markdown(self) -> str:
        """GitHub-flavoured, under its caption and above its note."""
        headings = [escape_markdown(heading) for heading in self.headings]
        lines = [[_in_markdown(cell) for cell in row] for row in self.rows]
        table = aligned(headings, lines, num_left=self.num_left, style="pipe")
        parts = f"## {escape_markdown(self.caption)}", table, escape_markdown(self.note)
        return "\n\n".join(filter(None, parts)) + "\n"


COLUMNS = (
    Column(metric="accuracy", heading="Acc", higher_is_better=True),
    Column(metric="pass_at_n", heading="P@N", higher_is_better=True),
    Column(
        metric="mean_tokens", heading="Tok", higher_is_better=False, scale=1, digits=0
    ),
    Column(metric="compression_ratio", heading="CR", higher_is_better=False, unit="%"),
    Column(
        metric="efficiency", heading="Eff", higher_is_better=True, scale=1, digits=2
    ),
)
MORE_COLUMNS = (
    Column(
        metric="norm_std", heading="NormStd", higher_is_better=False, scale=1, digits=3
    ),
    Column(
        metric="truncated_share", heading="cut off", higher_is_better=False, unit="%"
    ),
    Column(
        metric="no_answer_share", heading="no answer", higher_is_better=False, unit="%"
    ),
)


def title_of(block: str) -> str:
    """A benchmark's name as it is printed."""
    return _TITLES.get(block, block)


def used_columns(rows: Sequence[TableRow], columns: Iterable[Column]) -> list[Column]:
    """The columns that some row has a value for: no CR where there is no baseline."""
    present = {
        metric for row in rows for metrics in row.blocks.values() for metric in metrics
    }
    return [column for column in columns if column.metric in present]


def cells(
    rows: Sequence[TableRow], block: str, columns: Sequence[Column]
) -> list[list[Cell]]:
    """Those of every row, with intervals; a row without the block has none but -."""
    found = []
    for row in rows:
        metrics, deviations = row.blocks.get(block, {}), row.deviations.get(block, {})
        found.append(
            [_cell(metrics.get(c.metric), c, deviations.get(c.metric)) for c in columns]
        )
    for place, column in enumerate(columns):
        values = {
            found[n][place].value: row.blocks[block][column.metric].value
            for n, row in enumerate(rows)
            if column.metric in row.blocks.get(block, {})
        }
        if len(values) > 1:
            choose = max if column.higher_is_better else min
            best = choose(values, key=values.__getitem__)
            for line in found:
                if line[place].value == best:
                    line[place] = Cell(
                        value=best, around=line[place].around, is_best=True
                    )
    return found


def _cell(estimate: Estimate | None, column: Column, deviation: float | None) -> Cell:
    if estimate is None:
        return Cell(value="-")
    around = ""
    if deviation is not None:
        around = f"± {column.text(deviation)}"
    elif estimate.low is not None and estimate.high is not None:
        around = f"[{column.text(estimate.low)}, {column.text(estimate.high)}]"
    return Cell(value=column.text(estimate.value), around=around)


def markdown_table(
    rows: Sequence[TableRow], blocks: Sequence[str], *, intervals: bool
) -> str:
    """A GitHub-flavoured table: a line a row, `blocks` side by side; ends with a line feed."""
    columns = used_columns(rows, COLUMNS)
    headings = [
        f"{escape_markdown(title_of(block))} {column.titled}"
        for block in blocks
        for column in columns
    ]
    lines = [[escape_markdown(row.label)] for row in rows]
    for block in blocks:
        for line, found in zip(lines, cells(rows, block, columns), strict=True):
            for cell in found:
                text = str(cell) if intervals else cell.value
                line.append(f"**{text}**" if cell.is_best else text)
    return aligned(["Method", *headings], lines, style="pipe") + "\n"


def aligned(
    headings: Sequence[str],
    lines: Sequence[Sequence[object]],
    *,
    num_left: int = 1,
    style: str = "simple",
) -> str:
    """A table of texts in a style of tabulate's: to the right but for the first columns."""
    align = ["left"] * num_left + ["right"] * (len(headings) - num_left)
    return tabulate(
        lines, headings, tablefmt=style, disable_numparse=True, colalign=align
    )


def text_table(rows: Sequence[TableRow], blocks: Sequence[str]) -> str:
    """For a terminal: a line a benchmark and model, intervals of accuracy and tokens alone."""
    columns = [*used_columns(rows, COLUMNS), *MORE_COLUMNS]
    lines = []
    for block, label, found in _lines(rows, blocks, columns):
        shown = [
            str(cell) if column.metric in ("accuracy", "mean_tokens") else cell.value
            for cell, column in zip(found, columns, strict=True)
        ]
        lines.append([block, label, *shown])
    headings = ["", "", *(column.heading for column in columns)]
    return aligned(headings, lines, num_left=2, style="plain") + "\n"


def paper_table(
    rows: Sequence[TableRow], blocks: Sequence[str], caption: str, note: str = ""
) -> Table:
    """The rows of `text_table` with all intervals; without a column for blocks if there is one."""
    columns = used_columns(rows, (*COLUMNS, *MORE_COLUMNS))
    skipped = 1 if len(blocks) == 1 else 0
    lines: list[list[Cell | str]] = [
        [block, label, *found] for block, label, found in _lines(rows, blocks, columns)
    ]
    return Table(
        caption=caption,
        headings=["Benchmark", "Method", *(column.titled for column in columns)][
            skipped:
        ],
        rows=[line[skipped:] for line in lines],
        num_left=2 - skipped,
        note=note,
    )


def _lines(
    rows: Sequence[TableRow], blocks: Sequence[str], columns: Sequence[Column]
) -> Iterator[tuple[str, str, list[Cell]]]:
    """Block, named in its first line alone; label; and cells."""
    for block in blocks:
        for place, found in enumerate(cells(rows, block, columns)):
            yield title_of(block) if place == 0 else "", rows[place].label, found


def _in_markdown(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return escape_markdown(cell)
    return f"**{cell}**" if cell.is_best else str(cell)


def escape_markdown(text: str) -> str:
    """The text without what Markdown would read as its own."""
    return re.sub(r"([\\|*_`<])", r"\\\1", text)
