r"""Tables for papers: LaTeX with booktabs, with the same cells as the page and Markdown.

Texts come from users, so every character that LaTeX would interpret is escaped.
"""

import textwrap
from collections.abc import Sequence

from megatron_opsft.commands.report.table import Cell, Table, plain_text

_ESCAPES = {
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
}
_HEAD = r"""% Tables of `megatron-opsft report --figures`. They need
%   \usepackage[T1]{fontenc}
%   \usepackage{booktabs}"""


def write_latex(tables: Sequence[Table]) -> str:
    """Return all tables, each below a comment with its caption and note."""
    return "\n\n".join([_HEAD, *map(_tabular, tables)]) + "\n"


def escape_latex(text: str) -> str:
    """Return the text on one line, with every character escaped that LaTeX would interpret."""
    text = plain_text(text)
    escaped = []
    for index, sign in enumerate(text):
        before = text[index - 1] if index else " "
        after = text[index + 1 : index + 2]
        if sign == "-" and before in " [(" and after.isdigit():
            escaped.append("$-$")  # a minus
        elif sign == "-" and before == "-":
            escaped.append("{}-")  # LaTeX would make a dash of two
        else:
            escaped.append(_ESCAPES.get(sign, sign))
    return "".join(escaped)


def _tabular(table: Table) -> str:
    r"""Return a tabular. If it has two columns of texts, the first one names a group of rows, such
    as a benchmark, in the group's first row; a rule is drawn before it.
    """
    columns = "l" * table.num_left + "r" * (len(table.headings) - table.num_left)
    lines = [_comment(text) for text in (table.caption, table.note) if text]
    lines += [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    lines += [_row(table.headings), r"\midrule"]
    for number, row in enumerate(table.rows):
        is_new_group = table.num_left > 1 and row[0]
        if number and is_new_group:
            lines.append(r"\midrule")
        lines.append(_row(row))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def _row(cells: Sequence[Cell | str]) -> str:
    r"""Return a row that ends with \\. After \\ of the row before, LaTeX would read a bracket or a
    star as an argument, so {} stands before these.
    """
    texts = [_cell(cell) for cell in cells]
    if texts[0].startswith(("[", "*")):
        texts[0] = "{}" + texts[0]
    return " & ".join(texts) + r" \\"


def _cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return escape_latex(cell)
    text = escape_latex(cell.value)
    if cell.is_best:
        text = rf"\textbf{{{text}}}"
    if cell.around:
        text = rf"{text} {{\scriptsize {escape_latex(cell.around)}}}"
    return text


def _comment(text: str) -> str:
    plain = "".join(sign if sign.isprintable() else " " for sign in text)
    return textwrap.fill(
        plain, 96, initial_indent="% ", subsequent_indent="% ", break_on_hyphens=False
    )
