"""Markdown and LaTeX tables shaped like the paper's main table: a row per model or method, a block
of columns per benchmark and one overall.

The best value of a column is bold; values that print alike are equally good. Nothing is bold in a
table of one row or in a column where all rows print alike.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_opsft.evaluate.results import OVERALL, BudgetPoint
from megatron_opsft.report.estimate import Estimate

_ARROWS = {"up": "↑", "down": "↓"}
_TITLES = {
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
    "amc23": "AMC23",
    "aime24": "AIME24",
    "aime25": "AIME25",
    OVERALL: "Overall",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One model. blocks: benchmark (or OVERALL) -> metric -> estimate; a metric that is absent
    prints as -. budgets: block -> its points, empty without a curve. reference: the model whose
    tokens are 100 % of CR, if there is one.
    """

    label: str
    blocks: Mapping[str, Mapping[str, Estimate]]
    budgets: Mapping[str, tuple[BudgetPoint, ...]] = field(default_factory=dict)
    reference: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """unit: printed behind the value; scale: from the stored to the printed unit."""

    metric: str
    heading: str
    higher_is_better: bool
    scale: float = 100.0
    digits: int = 1
    unit: str = ""

    @property
    def direction(self) -> str:
        return "up" if self.higher_is_better else "down"


_COLUMNS = (
    _Column(metric="accuracy", heading="Acc", higher_is_better=True),
    _Column(metric="pass_at_n", heading="P@N", higher_is_better=True),
    _Column(metric="mean_tokens", heading="Tok", higher_is_better=False, scale=1, digits=0),
    _Column(metric="compression_ratio", heading="CR", higher_is_better=False, unit="%"),
    _Column(metric="efficiency", heading="Eff", higher_is_better=True, scale=1, digits=2),
)
_MORE = (
    _Column(metric="norm_std", heading="NormStd", higher_is_better=False, scale=1, digits=3),
    _Column(metric="truncated_share", heading="cut off", higher_is_better=False, unit="%"),
    _Column(metric="no_answer_share", heading="no answer", higher_is_better=False, unit="%"),
)


def title_of(block: str) -> str:
    """A benchmark's name as it is printed."""
    return _TITLES.get(block, block)


def markdown_table(rows: Sequence[TableRow], blocks: Sequence[str], *, intervals: bool) -> str:
    """A GitHub-flavoured table of `blocks` in their order; ends with a line feed."""
    columns = _used_columns(rows)
    headings = [
        f"{_escape_markdown(title_of(block))} {column.heading}{_ARROWS[column.direction]}"
        for block in blocks
        for column in columns
    ]
    lines = [_markdown_line(["Method", *headings])]
    lines.append("|---|" + "---:|" * len(headings))
    cells = _cells(rows, blocks, columns, intervals)
    for row, printed in zip(rows, cells, strict=True):
        texts = [f"**{text}**" if best else text for text, best in printed]
        lines.append(_markdown_line([_escape_markdown(row.label), *texts]))
    return "\n".join(lines) + "\n"


def text_table(rows: Sequence[TableRow], blocks: Sequence[str]) -> str:
    """For a terminal: a line per benchmark and model, intervals of accuracy and tokens alone."""
    columns = [*_used_columns(rows), *_MORE]
    lines = [["", "", *(column.heading for column in columns)]]
    for block in blocks:
        for place, row in enumerate(rows):
            values = [row.blocks[block].get(column.metric) for column in columns]
            shown = [
                _cell(value, column, None, column.metric in ("accuracy", "mean_tokens"))[0]
                for value, column in zip(values, columns, strict=True)
            ]
            lines.append([title_of(block) if place == 0 else "", row.label, *shown])
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "".join(
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        + "\n"
        for line in lines
    )


def latex_table(
    rows: Sequence[TableRow], blocks: Sequence[str], *, intervals: bool, caption: str = ""
) -> str:
    """A `table*` as wide as the text; needs the packages booktabs and graphicx."""
    columns = _used_columns(rows)
    width = len(columns)
    groups, rules, headings = [], [], []
    for place, block in enumerate(blocks):
        groups.append(
            rf"\multicolumn{{{width}}}{{c}}{{\textbf{{{_escape_latex(title_of(block))}}}}}"
        )
        first = 2 + place * width
        rules.append(rf"\cmidrule(lr){{{first}-{first + width - 1}}}")
        for column in columns:
            headings.append(rf"{column.heading}$\{column.direction}arrow$")
    lines = [
        "% needs \\usepackage{booktabs,graphicx}",
        "\\begin{table*}[t]",
        "\\centering",
        *([rf"\caption{{{_escape_latex(caption)}}}"] if caption else []),
        "\\resizebox{\\textwidth}{!}{%",
        rf"\begin{{tabular}}{{@{{}}l{'r' * width * len(blocks)}@{{}}}}",
        "\\toprule",
        " & ".join(["", *groups]).lstrip() + r" \\",
        " ".join(rules),
        " & ".join(["\\textbf{Method}", *headings]) + r" \\",
        "\\midrule",
    ]
    cells = _cells(rows, blocks, columns, intervals)
    for row, printed in zip(rows, cells, strict=True):
        texts = [_latex_cell(text, best) for text, best in printed]
        lines.append(" & ".join([_escape_latex(row.label), *texts]) + r" \\")
    lines += ["\\bottomrule", "\\end{tabular}}", "\\end{table*}"]
    return "\n".join(lines) + "\n"


def _used_columns(rows: Sequence[TableRow]) -> list[_Column]:
    """The columns that some row has a value for: no CR where there is no baseline."""
    present = {metric for row in rows for metrics in row.blocks.values() for metric in metrics}
    return [column for column in _COLUMNS if column.metric in present]


def _cells(
    rows: Sequence[TableRow], blocks: Sequence[str], columns: Sequence[_Column], intervals: bool
) -> list[list[tuple[str, bool]]]:
    """For every row the text of each of its cells, and whether it is the best of its column."""
    by_column = []
    for block in blocks:
        for column in columns:
            found = [row.blocks[block].get(column.metric) for row in rows]
            best = _best_text(found, column)
            by_column.append([_cell(value, column, best, intervals) for value in found])
    return [list(cells) for cells in zip(*by_column, strict=True)]


def _cell(
    value: Estimate | None, column: _Column, best: str | None, intervals: bool
) -> tuple[str, bool]:
    if value is None:
        return "-", False
    text = _print(value.value, column)
    is_best = text == best
    if intervals and value.low is not None and value.high is not None:
        text += f" [{_print(value.low, column)}, {_print(value.high, column)}]"
    return text, is_best


def _best_text(found: Sequence[Estimate | None], column: _Column) -> str | None:
    """The best value of a column as printed; None where there is nothing to choose from."""
    values = [value.value for value in found if value is not None]
    if len({_print(value, column) for value in values}) < 2:
        return None
    return _print(max(values) if column.higher_is_better else min(values), column)


def _print(value: float, column: _Column) -> str:
    scaled = value * column.scale
    # Tokens are whole numbers but where these would hide a difference: small models answer briefly.
    digits = 1 if column.metric == "mean_tokens" and scaled < 100 else column.digits
    return f"{scaled:,.{digits}f}{column.unit}"


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\|*_`<])", r"\\\1", text)


def _latex_cell(text: str, best: bool) -> str:
    value, space, interval = text.partition(" ")
    value = _escape_latex(value)
    shown = rf"\textbf{{{value}}}" if best else value
    return shown + (rf" {{\scriptsize {_escape_latex(interval)}}}" if space else "")


def _escape_latex(text: str) -> str:
    words = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return re.sub(r"[\\~^%&_#${}]", lambda found: words.get(found[0], "\\" + found[0]), text)
