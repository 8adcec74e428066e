"""Several results side by side: rows, baselines, settings that differ, tables cell by cell; and the
paper's main table by our code, to the printed digit.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from eval_samples import Model, made_model
from forked_cli import ForkedCli
from made_runs import make_evaluation

from megatron_opsft.commands.evaluate.comparison import compare
from megatron_opsft.commands.evaluate.metrics import combine, efficiency
from megatron_opsft.commands.evaluate.results import (
    BenchmarkResults,
    BlockResults,
    Results,
    build_results,
)
from megatron_opsft.commands.report.page_sections import plots_of_block
from megatron_opsft.commands.report.table import (
    OVERALL,
    Estimate,
    TableRow,
    markdown_table,
    text_table,
)
from megatron_opsft.errors import UserError
from megatron_opsft.records import FinishReason

BOTH = ("gsm8k", "aime24")
SETTINGS = {"max_tokens": 4096, "template": {"name": "r1"}}
OLD = made_model("old", 1000, 6, BOTH, 4, **SETTINGS)
NEW = made_model("new", 200, 7, BOTH, 4, **SETTINGS)
OLD_TOKENS, NEW_TOKENS = 1504.5, 304.5  # overall


def build(own: Model, base: Model | None = None, budgets: tuple[int, ...] = (64, 4096)) -> Results:
    return build_results(*own, baseline=base and base[:2], budgets=budgets)


def ratios(results: list[Results], baseline: str | None = None) -> list[float | None]:
    rows = [row.blocks[OVERALL] for row in compare(results, baseline=baseline).rows]
    return [
        round(row["compression_ratio"].value, 3) if "compression_ratio" in row else None
        for row in rows
    ]


def titles(results: list[Results]) -> str:
    return " ".join(plot.title for plot in plots_of_block(compare(results).rows, OVERALL))


def test_rows_hold_the_stored_estimates() -> None:
    old, new = build(OLD), build(NEW, OLD)
    comparison = compare([old, new])
    assert comparison.blocks == (*BOTH, OVERALL)
    assert [row.label for row in comparison.rows] == ["old", "new"]
    blocks = comparison.rows[1].blocks
    assert blocks == {name: block.metrics for name, block in new.blocks.items()}
    assert blocks[OVERALL]["compression_ratio"].low is not None
    assert comparison.notes == () and "brackets: 95 % intervals" in comparison.markdown()


def test_compression_ratio_is_against_the_first_row_or_the_named_one() -> None:
    old, new = build(OLD), build(NEW, OLD)
    other = build(made_model("other", 500, 5, BOTH))
    expected = round(NEW_TOKENS / OLD_TOKENS, 3)
    assert ratios([old, new]) == ratios([old, build(NEW)]) == [1, expected]
    assert ratios([new, old]) == [1, round(OLD_TOKENS / NEW_TOKENS, 3)]
    assert (ratios([old]), ratios([new])) == ([None], [expected])  # alone: as it was evaluated
    assert ratios([new, old, other], "old") == [expected, 1, round(754.5 / OLD_TOKENS, 3)]
    with pytest.raises(UserError, match="baseline nobody: there are old, new"):
        ratios([old, new], "nobody")
    # An interval is that of these samples alone: another evaluation is another baseline.
    again = build(made_model("old", 1100, 6, BOTH))
    ratio = compare([again, new]).rows[1].blocks[OVERALL]["compression_ratio"]
    assert (ratio.value, ratio.low) == (pytest.approx(NEW_TOKENS / 1654.5), None)


def test_shared_benchmarks_alone_are_compared_and_other_sets_have_no_overall() -> None:
    few = compare([build(OLD), build(made_model("few", 300, 5, ("aime24", "math500")))])
    assert few.blocks == ("aime24",)
    assert "left out: gsm8k, math500" in few.markdown()
    comparison = compare([build(made_model("whole", 100, 4, (*BOTH, "math500"))), build(OLD)])
    assert comparison.blocks == BOTH
    assert all(OVERALL not in row.blocks for row in comparison.rows)
    ratio = comparison.rows[1].blocks["aime24"]["compression_ratio"]
    assert ratio.value == pytest.approx(2004.5 / 204.5)
    assert "Overall" not in comparison.markdown()
    with pytest.raises(UserError, match="the results share no benchmark.*old: gsm8k, aime24; x: m"):
        compare([build(OLD), build(made_model("x", 9, 1, ("math500",)))])


def cut(model: Model, **num_cut: int) -> Results:
    """Results of a model of which the limit cut off the first responses to each benchmark."""
    name, samples, settings = model
    for benchmark, num in num_cut.items():
        unfinished = [
            replace(one, finish_reason=FinishReason.LENGTH) for one in samples[benchmark][:num]
        ]
        samples = samples | {benchmark: [*unfinished, *samples[benchmark][num:]]}
    return build((name, samples, settings))


LIMITED = (
    "of the responses were cut off, so accuracy and tokens are lower than the model's; raise "
    "max_tokens"
)
DOMINATED = "; until then the limit dominates this comparison."


def test_a_limit_that_cuts_many_responses_off_is_warned_of_as_in_training(tmp_path: Path) -> None:
    """In every place: the terminal, table.md, the papers' note and the top of the page."""
    one = ("gsm8k",)
    old = cut(made_model("old", 1000, 6, one, 4), gsm8k=24)
    new = cut(made_model("new", 200, 7, one, 4), gsm8k=6)
    few = cut(made_model("few", 200, 7, one, 4), gsm8k=2)  # 5 %: not above the bound
    both = compare([old, new, few])
    said = f"60.0 % (old), 15.0 % (new) {LIMITED}{DOMINATED}"
    assert both.warning == said
    assert both.text().endswith(f"\nWARNING {said}\n") and f"\n**{said}**\n" in both.markdown()
    assert both.paper_table().note.endswith(said)
    evaluations = [make_evaluation(tmp_path / name, name, 200, 7) for name in ("old", "new", "few")]
    both.write_page(tmp_path / "page.html", evaluations)
    page = (tmp_path / "page.html").read_text()
    shown = said.replace("'", "&#39;")
    assert page.count(shown) == 1 and page.index(shown) < page.index("<table")
    assert compare([old]).warning == f"60.0 % {LIMITED}."
    assert compare([few]).warning == "" and "WARNING" not in compare([few]).text()
    several = compare([cut(OLD, aime24=20)])
    assert several.warning == f"50.0 % (AIME24) {LIMITED}."


def test_equal_names_are_told_apart() -> None:
    rows = compare([build(made_model(n, 9, 1, BOTH)) for n in ("a", "a (2)", "a")]).rows
    assert [row.label for row in rows] == ["a", "a (2)", "a (3)"]


def test_every_setting_that_differs_is_named() -> None:
    settings = {"temperature": 1.0, "template": {"name": "cod"}, "engine": "vllm 1"}
    other = made_model("new", 200, 7, BOTH, 2, **SETTINGS | settings)
    comparison = compare([build(OLD), build(other), build(OLD)], baseline="old (2)")
    assert set(comparison.notes) == {
        "differs: temperature: 0.6 (old, old (2)); 1.0 (new)",
        'differs: template.name: "r1" (old, old (2)); "cod" (new)',
        'differs: engine: (not set) (old, old (2)); "vllm 1" (new)',
        "differs: gsm8k.samples_per_problem: 4 (old, old (2)); 2 (new)",
        "differs: aime24.samples_per_problem: 4 (old, old (2)); 2 (new)",
    }
    text = comparison.markdown()
    assert all(note in text and note in comparison.text() for note in comparison.notes)
    assert "Baseline: old (2)." in text  # of one name: numbered
    assert "too narrow for as few as 10 problems: at a nominal 95 %" in text
    assert "GSM8K: 10 problems, N = 4 / 2" in text


def test_different_problems_are_marked_and_differences_are_paired_where_they_can_be(
    tmp_path: Path,
) -> None:
    old, new = build(OLD), build(NEW, OLD)
    comparison = compare([old, new])
    assert comparison.warning == ""
    differences = {name: block.differences for name, block in new.blocks.items()}
    assert comparison.rows[1].differences == differences
    assert comparison.rows[0].differences == compare([old, build(NEW)]).rows[1].differences == {}
    data = {"data": {"gsm8k": "2", "aime24": "1"}}
    models = [(*OLD[:2], SETTINGS | {"data": {"gsm8k": "1", "aime24": "1"}})]
    models.append((*NEW[:2], SETTINGS | data))
    warned = compare([build(model) for model in models])
    assert warned.warning == "Do not compare these models on GSM8K: their problems differ."
    evaluations = [make_evaluation(tmp_path / n, n, 100, 6) for n in "ab"]
    warned.write_page(tmp_path / "page.html", evaluations)
    page = (tmp_path / "page.html").read_text()
    assert page.index(warned.warning) < page.index("Acc: share of correct samples")


def test_what_a_result_has_not_is_not_shown() -> None:
    """No spread of lengths of one sample. Early exit has no budget curve: it tries answers by the
    room left, so its samples, cut, are not those of a smaller limit.
    """
    one = build(made_model("one", 300, 6, BOTH, 1))
    of_old, of_one = (row.budgets[OVERALL][0][1] for row in compare([build(OLD), one]).rows)
    assert "norm_std" in of_old and "norm_std" not in of_one
    _, *lines = compare([one]).text().splitlines()
    assert [line.split()[-3:] for line in lines] == [["-", "0.0%", "0.0%"]] * 3
    assert "NormStd" in titles([build(OLD), one]) and "NormStd" not in titles([one])
    early = build(made_model("early", 300, 6, BOTH, method="deer"), budgets=())
    comparison = compare([build(OLD), early])
    for block in comparison.blocks:
        assert [row.label for row in comparison.rows if row.budgets[block]] == ["old"]
    for text in (comparison.markdown(), comparison.text()):
        assert "no budget curve: early (early exit tries answers by the room left" in text
    assert "budget" not in titles([early]) and "budget" in titles([build(OLD)])
    assert "no budget curve" not in compare([build(OLD)]).markdown()


def test_the_command_writes_a_table_and_a_page(cli: ForkedCli, tmp_path: Path) -> None:
    models = [make_evaluation(tmp_path / n, n, t, 6) for n, t in (("long", 300), ("short", 100))]
    out = tmp_path / "new" / "comparison"
    words = ["eval", "compare", *models, f"--out={out}"]
    ended = cli.run(words)
    assert ended.exit_code == 0 and "long" in ended.stdout, ended.stderr
    assert f"table and page: {out}" in ended.stdout
    assert "\n| short " in (out / "table.md").read_text()
    assert "Baseline: long." in (out / "report.html").read_text()
    assert cli.run(words).error.endswith("is a file or holds a table.md; name another one")


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
    table = re.sub(r" \[[^]]*\]", "", markdown_table(ROWS, ["gsm8k"]))  # without intervals
    head, rule, *lines = table.splitlines()
    columns = ("Acc↑", "P@N↑", "Tok↓", "CR↓", "Eff↑")
    assert cells(head) == ["Method", *(f"GSM8K {column}" for column in columns)]
    assert [cell[-1] for cell in rule.strip("|").split("|")] == ["-", *":::::"]
    assert [cells(line) for line in lines] == [
        ["CoT", "59.0", "75.0", "10,178", "100.0%", "0.58"],
        ["On-Policy SFT", "**59.9**", "75.0", "2,186", "**21.5%**", "2.74"],
        ["a\\_b\\|c & 5%", "**59.9**", "75.0", "**51.3**", "-", "**116.85**"],
    ]
    lines = markdown_table(ROWS, [OVERALL]).splitlines()
    assert cells(lines[3])[1:4] == ["**59.9 [58.9, 60.9]**", "75.0", "2,186 [2,176, 2,196]"]
    for nothing_is_best in (ROWS[:1], [ROWS[0]] * 2):
        assert "**" not in markdown_table(nothing_is_best, ["gsm8k"])


def test_a_terminal_gets_a_line_per_benchmark_and_model() -> None:
    head, *lines = text_table(ROWS[:2], ["gsm8k", OVERALL]).splitlines()
    assert re.split(" {2,}", head.strip())[4:] == ["Eff", "NormStd", "cut off", "no answer"]
    first = ["GSM8K", "CoT", "59.0 [58.0, 60.0]", "75.0", "10,178 [10,168, 10,188]"]
    assert re.split(" {2,}", lines[0])[:5] == first
    assert lines[2].startswith("Overall  CoT") and len(lines) == 4
    assert lines[3].split()[-5:] == ["21.5%", "2.74", "0.300", "-", "-"]
    assert len({line.index("7") for line in lines}) == 1  # the columns are aligned


# The paper's rows CoT (the original model) and On-Policy SFT: Acc, P@N, Tok and CR of each
# benchmark; then Acc, P@N, Tok, CR and Eff overall. CR and what is overall follow from the others.
PAPER = {
    "1.5B CoT": """85.0 92.0 2,533 100.0  86.0 93.4 5,420 100.0  73.0 92.5 9,171 100.0
        25.3 50.0 17,418 100.0  26.0 40.0 16,348 100.0  59.0 73.5 10,178 100.0 0.58""",
    "1.5B On-Policy SFT": """86.1 92.1 696 27.5  85.7 92.5 1,354 25.0  73.5 90.0 1,977 21.6
        30.7 56.7 3,808 21.8  23.3 36.7 3,096 18.9  59.9 73.6 2,186 21.5 2.74""",
    "7B CoT": """92.5 95.3 1,701 100.0  93.0 96.2 4,132 100.0  88.5 95.0 6,722 100.0
        54.0 80.0 13,960 100.0  38.6 56.6 14,478 100.0  73.3 84.6 8,199 100.0 0.89""",
    "7B On-Policy SFT": """92.6 96.0 498 29.3  91.4 95.0 1,178 28.5  87.5 97.5 1,961 29.2
        52.6 80.0 4,594 32.9  40.0 60.0 4,039 27.9  72.8 85.7 2,454 29.9 2.97""",
}
NAMES = ("gsm8k", "math500", "amc23", "aime24", "aime25")
# (row, place) -> what it should be: the paper seems to cut these off where it rounds elsewhere.
INCONSISTENT = {
    # Printed 59.0; (85.0 + 86.0 + 73.0 + 25.3 + 26.0) / 5 = 59.06. The one of the three that the
    # rounding of the raw entries could explain, if GSM8K and MATH-500 add up to less than 170.92.
    ("1.5B CoT", 20): "59.1",
    ("1.5B CoT", 21): "73.6",  # printed 73.5; (92.0 + 93.4 + 92.5 + 50.0 + 40.0) / 5 = 73.58
    ("1.5B On-Policy SFT", 15): "21.9",  # printed 21.8; 3,808 / 17,418 = 21.862 %
}


def typed_results(row: str) -> Results:
    """Results with the paper's raw entries in place of measured ones."""
    entries = [float(entry.replace(",", "")) for entry in PAPER[row].split()]
    own = {}
    for place, name in enumerate(NAMES):
        accuracy, pass_at_n, tokens = np.array(entries[4 * place : 4 * place + 3])[:, None]
        own[name] = {"accuracy": accuracy / 100, "pass_at_n": pass_at_n / 100}
        own[name] |= {"mean_tokens": tokens, "efficiency": efficiency(accuracy / 100, tokens)}

    def scores(metrics: dict[str, np.ndarray]) -> dict[str, object]:
        estimates = {name: Estimate(value=value[0]) for name, value in metrics.items()}
        return {"metrics": estimates, "differences": {}, "budgets": ()}

    size = {"num_problems": 30, "samples_per_problem": 5}
    benchmarks = {name: BenchmarkResults(**scores(each), **size) for name, each in own.items()}
    overall = BlockResults(**scores(combine(list(own.values()))))
    return Results(model=row, baseline=None, settings={}, benchmarks=benchmarks, overall=overall)


@pytest.mark.parametrize("model", ["1.5B", "7B"])
def test_our_table_prints_the_paper_rows(model: str) -> None:
    rows = [row for row in PAPER if row.startswith(model)]
    lines = compare([typed_results(row) for row in rows]).markdown().splitlines()
    for line, row in zip(lines[2:4], rows, strict=True):
        label, *found = [cell.strip("*").rstrip("%") for cell in cells(line)]
        assert label == row
        # The paper has Eff overall alone.
        found = [cell for at, cell in enumerate(found) if at % 5 != 4 or at == 29]
        entries = enumerate(PAPER[row].split())
        assert found == [INCONSISTENT.get((row, at), entry) for at, entry in entries]
