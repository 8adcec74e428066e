"""Tables for Markdown and for a terminal, cell by cell."""

import re
from dataclasses import replace

from megatron_opsft.report.table import OVERALL, Estimate, TableRow, markdown_table, text_table


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


def cells(line: str) -> list[str]:
    """Of a line of Markdown."""
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_markdown() -> None:
    head, rule, *lines = markdown_table(ROWS, ["gsm8k"], intervals=False).splitlines()
    assert cells(head) == [
        "Method",
        "GSM8K Acc↑",
        "GSM8K P@N↑",
        "GSM8K Tok↓",
        "GSM8K CR↓",
        "GSM8K Eff↑",
    ]
    assert [cell[-1] for cell in rule.strip("|").split("|")] == ["-", *":::::"]
    assert [cells(line) for line in lines] == [
        ["CoT", "59.0", "75.0", "10,178", "100.0%", "0.58"],
        ["On-Policy SFT", "**59.9**", "75.0", "2,186", "**21.5%**", "2.74"],
        ["a\\_b\\|c & 5%", "**59.9**", "75.0", "**51.3**", "-", "**116.85**"],
    ]


def test_intervals_stand_behind_their_values() -> None:
    lines = markdown_table(ROWS, [OVERALL], intervals=True).splitlines()
    assert cells(lines[3]) == [
        *("On-Policy SFT", "**59.9 [58.9, 60.9]**", "75.0", "2,186 [2,176, 2,196]"),
        *("**21.5%**", "2.74"),
    ]


def test_a_deviation_of_seeds_stands_in_place_of_the_interval() -> None:
    seeds = replace(ROWS[0], deviations={"gsm8k": {"accuracy": 0.004}})
    lines = markdown_table([seeds], ["gsm8k"], intervals=True).splitlines()
    assert cells(lines[2])[1] == "59.0 ± 0.4"


def test_nothing_is_bold_where_nothing_is_best() -> None:
    assert "**" not in markdown_table(ROWS[:1], ["gsm8k"], intervals=False)
    assert "**" not in markdown_table([ROWS[0], ROWS[0]], ["gsm8k"], intervals=False)


def test_no_column_without_a_value() -> None:
    assert "CR" not in markdown_table(ROWS[2:], ["gsm8k"], intervals=False)


def test_a_terminal_gets_a_line_per_benchmark_and_model() -> None:
    lines = text_table(ROWS[:2], ["gsm8k", OVERALL]).splitlines()
    assert lines[0].split() == [
        *("Acc", "P@N", "Tok", "CR", "Eff", "NormStd", "cut", "off", "no", "answer")
    ]
    first = ["GSM8K", "CoT", "59.0 [58.0, 60.0]", "75.0", "10,178 [10,168, 10,188]"]
    assert re.split(" {2,}", lines[1])[:5] == first
    assert lines[2].split()[:3] == ["On-Policy", "SFT", "59.9"]
    assert lines[3].startswith("Overall  CoT") and len(lines) == 5
    assert lines[4].split()[-5:] == ["21.5%", "2.74", "0.300", "-", "-"]
    assert len({line.index("7") for line in lines[1:]}) == 1  # the columns are aligned
