"""Several results side by side: rows, baselines, settings that differ, figures' data."""

import pytest
from eval_samples import stored

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.comparison import compare
from megatron_opsft.evaluate.results import ModelSamples, Results, build_results
from megatron_opsft.report.table import OVERALL
from megatron_opsft.report.tables import plots_of_block

BUDGETS = (64, 4096)


def model(
    name: str,
    tokens: int,
    correct: int,
    benchmarks: tuple[str, ...] = ("gsm8k", "aime24"),
    samples: int = 4,
    **settings: object,
) -> ModelSamples:
    """`correct` of 10 problems are solved; lengths are `tokens`, and twice that on AIME."""
    return ModelSamples(
        name=name,
        samples={
            benchmark: [
                stored(f"p{p}", n, tokens * (2 if benchmark == "aime24" else 1) + n, p < correct)
                for p in range(10)
                for n in range(samples)
            ]
            for benchmark in benchmarks
        },
        settings={"temperature": 0.6, "max_tokens": 4096, "template": {"name": "r1"}} | settings,
    )


def build(
    own: ModelSamples, base: ModelSamples | None = None, budgets: tuple[int, ...] = BUDGETS
) -> Results:
    return build_results(own, baseline=base, budgets=budgets)


OLD, NEW = model("old", 1000, 6), model("new", 200, 7)


def ratios(results: list[Results], baseline: str | None = None) -> list[float | None]:
    found = []
    for row in compare(results, baseline=baseline).rows:
        estimate = row.blocks[OVERALL].get("compression_ratio")
        found.append(None if estimate is None else round(estimate.value, 3))
    return found


def test_rows_hold_the_stored_estimates() -> None:
    old, new = build(OLD), build(NEW, OLD)
    comparison = compare([old, new])
    assert comparison.blocks == ("gsm8k", "aime24", OVERALL)
    assert [row.label for row in comparison.rows] == ["old", "new"]
    blocks = comparison.rows[1].blocks
    assert blocks["gsm8k"] == new.benchmarks["gsm8k"].metrics
    assert blocks[OVERALL] == new.overall.metrics
    assert blocks[OVERALL]["compression_ratio"].low is not None
    assert comparison.notes == ()
    assert "In brackets: 95 % intervals" in comparison.markdown()


def test_compression_ratio_is_against_the_first_row_or_the_named_one() -> None:
    old, new, other = build(OLD), build(NEW, OLD), build(model("other", 500, 5))
    expected = round(301.5 / 1501.5, 3)
    assert ratios([old, new]) == ratios([old, build(NEW)]) == [1, expected]
    assert ratios([new, old]) == [1, round(1501.5 / 301.5, 3)]
    assert (ratios([old]), ratios([new])) == ([None], [expected])  # alone: as it was evaluated
    assert ratios([new, old, other], "old") == [expected, 1, round(751.5 / 1501.5, 3)]
    with pytest.raises(UserError, match="baseline nobody: there are old, new"):
        ratios([old, new], "nobody")


def test_an_interval_of_a_ratio_is_that_of_these_samples_alone() -> None:
    """Another evaluation of the same name is another baseline."""
    new = build(NEW, OLD)
    again = compare([build(model("old", 1100, 6)), new]).rows[1].blocks[OVERALL]
    ratio = again["compression_ratio"]
    assert (ratio.value, ratio.low) == (pytest.approx(301.5 / 1651.5), None)


def test_shared_benchmarks_alone_are_compared_and_other_sets_have_no_overall() -> None:
    names = ("gsm8k", "aime24", "math500")
    few = compare([build(OLD), build(model("few", 300, 5, ("aime24", "math500")))])
    assert few.blocks == ("aime24",)
    assert "left out: gsm8k, math500" in few.markdown()
    comparison = compare([build(model("whole", 100, 4, names)), build(OLD)])
    assert comparison.blocks == ("gsm8k", "aime24")
    assert all(OVERALL not in row.blocks for row in comparison.rows)
    ratio = comparison.rows[1].blocks["aime24"]["compression_ratio"]
    assert ratio.value == pytest.approx(2001.5 / 201.5)
    assert "Overall" not in comparison.markdown()
    with pytest.raises(UserError, match="the results share no benchmark.*old: gsm8k, aime24; x: m"):
        compare([build(OLD), build(model("x", 9, 1, ("math500",)))])


def test_every_setting_that_differs_is_named() -> None:
    other = model(
        "new", 200, 7, samples=2, temperature=1.0, template={"name": "cod"}, engine="vllm 1"
    )
    comparison = compare([build(OLD), build(other), build(OLD)], baseline="old (2)")
    assert "Baseline: old (2)." in comparison.markdown()  # of one name: numbered
    assert "too narrow for as few as 10 problems: at a nominal 95 %" in comparison.markdown()
    assert set(comparison.notes) == {
        "differs: temperature: 0.6 (old, old (2)); 1.0 (new)",
        'differs: template.name: "r1" (old, old (2)); "cod" (new)',
        'differs: engine: (not set) (old, old (2)); "vllm 1" (new)',
        "differs: gsm8k.samples_per_problem: 4 (old, old (2)); 2 (new)",
        "differs: aime24.samples_per_problem: 4 (old, old (2)); 2 (new)",
    }
    for text in (comparison.markdown(), comparison.text()):
        assert all(note in text for note in comparison.notes)
    assert "GSM8K: 10 problems, N = 4 / 2" in comparison.markdown()


def test_no_spread_of_lengths_is_shown_of_one_sample() -> None:
    one = build(model("one", 300, 6, samples=1))
    comparison = compare([build(OLD), one])
    of_old, of_one = (row.budgets[OVERALL][0][1] for row in comparison.rows)
    assert "norm_std" in of_old and "norm_std" not in of_one
    _, *lines = compare([one]).text().splitlines()
    assert [line.split()[-3:] for line in lines] == [["-", "0.0%", "0.0%"]] * 3
    assert any("NormStd" in plot.title for plot in plots_of_block(comparison.rows, OVERALL))
    assert not any("NormStd" in plot.title for plot in plots_of_block(compare([one]).rows, OVERALL))


def test_early_exit_has_no_budget_curve() -> None:
    """It tries answers by the room left: its samples, cut, are not those of a smaller limit."""
    early = build(model("early", 300, 6, method="deer"), budgets=())
    comparison = compare([build(OLD), early])
    for block in comparison.blocks:
        assert [row.label for row in comparison.rows if row.budgets[block]] == ["old"]
    for text in (comparison.markdown(), comparison.text()):
        assert "no budget curve: early (early exit tries answers by the room left" in text
    assert not any(
        "budget" in plot.title for plot in plots_of_block(compare([early]).rows, OVERALL)
    )
    assert "no budget curve" not in compare([build(OLD)]).markdown()
