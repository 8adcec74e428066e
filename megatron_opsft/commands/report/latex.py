r"""Tables for papers: LaTeX with booktabs, of the same cells as the page and Markdown.

Texts come from users, so whatever LaTeX would read as its own is written as a sign of the text.
"""

import textwrap
from collections.abc import Sequence

from megatron_opsft.commands.report.table import Cell, Table

_SIGNS = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "%": r"\%",
    "&": r"\&",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": r"$-$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "→": r"$\rightarrow$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "␣": r"\textvisiblespace{}",
    "\u00a0": "~",
}
_HEAD = r"""% Tables of `megatron-opsft report --figures`. They need
%   \usepackage[T1]{fontenc}
%   \usepackage{booktabs}"""


def write_latex(tables: Sequence[Table]) -> str:
    """All tables, each below a comment with its caption and what its values rest on."""
    return "\n\n".join([_HEAD, *map(_tabular, tables)]) + "\n"


def escape_latex(text: str) -> str:
    """The text on one line, without what LaTeX would read as its own."""
    plain = " ".join(text.split())
    shown = [_SIGNS.get(sign, sign if sign.isprintable() else "?") for sign in plain]
    for place, sign in enumerate(plain):
        before, after = plain[place - 1 : place], plain[place + 1 : place + 2]
        if sign == "-" and before in ("", " ", "[", "(") and after.isdigit():
            shown[place] = "$-$"
        elif sign == before == "-":  # two of them would become a dash
            shown[place] = "{}-"
    return "".join(shown)


def _tabular(table: Table) -> str:
    r"""A rule before a row that names its group, as a benchmark in the first of two columns."""
    columns = "l" * table.num_left + "r" * (len(table.headings) - table.num_left)
    lines = [_comment(table.caption)]
    if table.note:
        lines.append(_comment(table.note))
    lines += [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    lines += [_row(table.headings), r"\midrule"]
    for number, row in enumerate(table.rows):
        if number and table.num_left > 1 and row[0]:
            lines.append(r"\midrule")
        lines.append(_row(row))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def _row(cells: Sequence[Cell | str]) -> str:
    r"""Its end is \\, which would take a bracket or a star at the start of the next row for its
    own.
    """
    texts = [_cell(cell) for cell in cells]
    if texts[0][:1] in ("[", "*"):
        texts[0] = "{}" + texts[0]
    return " & ".join(texts) + r" \\"


def _cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return escape_latex(cell)
    value, around = escape_latex(cell.value), escape_latex(cell.around)
    value = rf"\textbf{{{value}}}" if cell.is_best else value
    return rf"{value} {{\scriptsize {around}}}" if around else value


def _comment(text: str) -> str:
    plain = "".join(sign if sign.isprintable() else " " for sign in text)
    return textwrap.fill(
        plain, 96, initial_indent="% ", subsequent_indent="% ", break_on_hyphens=False
    )
