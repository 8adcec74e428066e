"""Markdown and LaTeX tables, cell by cell."""

import re

from megatron_opsft.evaluate.results import OVERALL
from megatron_opsft.evaluate.table_formats import TableRow, latex_table, markdown_table, text_table
from megatron_opsft.report.estimate import Estimate


def row(label: str, accuracy: float, tokens: float, ratio: float | None) -> TableRow:
    metrics = {
        "accuracy": Estimate(value=accuracy, low=accuracy - 0.01, high=accuracy + 0.01),
        "pass_at_n": Estimate(value=0.75),
        "mean_tokens": Estimate(value=tokens, low=tokens - 10, high=tokens + 10),
        "efficiency": Estimate(value=1e4 * accuracy / tokens),
        "norm_std": Estimate(value=0.3),
    }
    if ratio is not None:
        metrics["compression_ratio"] = Estimate(value=ratio)
    return TableRow(label=label, blocks={"gsm8k": metrics, OVERALL: metrics})


ROWS = [
    row("CoT", 0.59, 10178, 1),
    row("On-Policy SFT", 0.59904, 2186.4, 0.21478),
    row("a_b|c & 5%", 0.59896, 51.26, None),
]


def test_markdown() -> None:
    assert markdown_table(ROWS, ["gsm8k"], intervals=False).splitlines() == [
        "| Method | GSM8K Acc↑ | GSM8K P@N↑ | GSM8K Tok↓ | GSM8K CR↓ | GSM8K Eff↑ |",
        "|---|---:|---:|---:|---:|---:|",
        "| CoT | 59.0 | 75.0 | 10,178 | 100.0% | 0.58 |",
        "| On-Policy SFT | **59.9** | 75.0 | 2,186 | **21.5%** | 2.74 |",
        "| a\\_b\\|c & 5% | **59.9** | 75.0 | **51.3** | - | **116.85** |",
    ]


def test_intervals_stand_behind_their_values() -> None:
    lines = markdown_table(ROWS, [OVERALL], intervals=True).splitlines()
    assert lines[3] == (
        "| On-Policy SFT | **59.9 [58.9, 60.9]** | 75.0 | 2,186 [2,176, 2,196] | **21.5%** | 2.74 |"
    )
    latex = latex_table(ROWS, [OVERALL], intervals=True)
    assert r"On-Policy SFT & \textbf{59.9} {\scriptsize [58.9, 60.9]} & 75.0 & 2,186" in latex


def test_nothing_is_bold_where_nothing_is_best() -> None:
    assert "**" not in markdown_table(ROWS[:1], ["gsm8k"], intervals=False)
    assert "**" not in markdown_table([ROWS[0], ROWS[0]], ["gsm8k"], intervals=False)


def test_no_column_without_a_value() -> None:
    assert "CR" not in markdown_table(ROWS[2:], ["gsm8k"], intervals=False)


def test_latex_is_balanced_and_rectangular() -> None:
    latex = latex_table(ROWS, ["gsm8k", OVERALL], intervals=True, caption="90% & more_")
    assert len(re.findall(r"(?<!\\)\{", latex)) == len(re.findall(r"(?<!\\)\}", latex))
    columns = re.search(r"@\{\}l(r+)@\{\}", latex)
    assert columns is not None and len(columns[1]) == 10
    lines = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 2 + len(ROWS)
    assert lines[0] == (
        r"& \multicolumn{5}{c}{\textbf{GSM8K}} & \multicolumn{5}{c}{\textbf{Overall}} \\"
    )
    for line in lines[1:]:
        assert len(re.findall(r"(?<!\\)&", line)) == 10
    assert r"\cmidrule(lr){2-6} \cmidrule(lr){7-11}" in latex
    assert lines[-1].startswith(r"a\_b|c \& 5\% & ")
    assert r"& 100.0\% & 0.58 &" in lines[2]
    assert r"\caption{90\% \& more\_}" in latex


def test_latex_escapes_every_special_character() -> None:
    special = row("\\ ~ ^ % & _ # $ { }", 0.5, 100, 1)
    last = latex_table([special], ["gsm8k"], intervals=False).splitlines()[-4]
    assert last.startswith(
        r"\textbackslash{} \textasciitilde{} \textasciicircum{} \% \& \_ \# \$ \{ \} & 50.0"
    )


def test_a_terminal_gets_a_line_per_benchmark_and_model() -> None:
    lines = text_table(ROWS[:2], ["gsm8k", OVERALL]).splitlines()
    assert lines[0].split() == [
        *("Acc", "P@N", "Tok", "CR", "Eff", "NormStd", "cut", "off", "no", "answer")
    ]
    assert lines[1].startswith("GSM8K    CoT            59.0 [58.0, 60.0]  75.0  10,178 [10,168")
    assert lines[2].split()[:3] == ["On-Policy", "SFT", "59.9"]
    assert lines[3].startswith("Overall  CoT") and len(lines) == 5
    assert lines[4].endswith("21.5%  2.74    0.300        -          -")
    assert len({line.index("7") for line in lines[1:]}) == 1  # the columns are aligned
