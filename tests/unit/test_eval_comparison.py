"""Several results side by side: rows, baselines, settings that differ, figures' data."""

from dataclasses import replace

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.bootstrap import Bootstrap
from megatron_opsft.evaluate.comparison import NOT_SET, SettingDifference, compare
from megatron_opsft.evaluate.metrics import ScoredSample
from megatron_opsft.evaluate.results import ModelSamples, Results, build_results
from megatron_opsft.report.page.evaluation_plots import pareto_front, plots_of_block
from megatron_opsft.report.table import OVERALL

FAST = Bootstrap(num_resamples=100)
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
                ScoredSample(
                    problem_id=f"p{p}",
                    sample_index=n,
                    num_tokens=tokens * (2 if benchmark == "aime24" else 1) + n,
                    correct=p < correct,
                    finished=True,
                    has_answer=True,
                )
                for p in range(10)
                for n in range(samples)
            ]
            for benchmark in benchmarks
        },
        settings={"temperature": 0.6, "max_tokens": 4096, "template": {"name": "r1"}} | settings,
    )


def build(own: ModelSamples, base: ModelSamples | None = None) -> Results:
    return build_results(own, baseline=base, budgets=BUDGETS, bootstrap=FAST)


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
    row = comparison.rows[1]
    assert row.blocks["gsm8k"] == new.benchmarks["gsm8k"].metrics
    assert row.blocks[OVERALL] == new.overall.metrics
    assert row.blocks[OVERALL]["compression_ratio"].low is not None
    assert comparison.differences == ()
    assert "In brackets: 95 % intervals" in comparison.markdown(intervals=True)
    assert "In brackets" not in comparison.markdown()


def test_compression_ratio_is_against_the_right_baseline() -> None:
    old, new = build(OLD), build(NEW, OLD)
    plain, other = build(NEW), build(model("other", 500, 5))
    expected = round(301.5 / 1501.5, 3)
    assert ratios([old, new]) == [1, expected]
    assert ratios([new, old]) == [expected, 1]
    assert ratios([new]) == [expected]
    assert ratios([old]) == [None]
    assert ratios([old, plain]) == [1, expected]  # nobody names a baseline: the first row
    assert ratios([new, old, other]) == [expected, 1, round(751.5 / 1501.5, 3)]
    assert ratios([old, plain], "new") == [round(1501.5 / 301.5, 3), 1]
    with pytest.raises(UserError, match="baseline nobody: there are old, new"):
        ratios([old, new], "nobody")


def test_a_baseline_of_the_same_label_is_another_model() -> None:
    """Told apart by their roles, in every order and whether or not the baseline has a row."""
    old, new = build(model("hf", 1000, 6)), build(model("hf", 200, 7), model("hf", 1000, 6))
    expected = round(301.5 / 1501.5, 3)
    assert ratios([old, new]) == [1, expected]
    assert ratios([new, old]) == [expected, 1]
    assert ratios([new]) == [expected]
    assert ratios([new, new]) == [expected, expected]
    assert ratios([build(OLD), new]) == [None, expected]
    assert ratios([new, old], "hf (2)") == [expected, 1]
    stranger, third = build(model("hf", 700, 5)), build(model("x", 500, 5))
    assert ratios([stranger, new, old, third])[1:] == [expected, 1, round(751.5 / 1501.5, 3)]
    assert "Baseline: hf (2)." in compare([new, old]).markdown()
    assert "Baseline: hf (not a row)." in compare([new]).markdown()
    last = build(model("hf", 100, 7), model("hf", 200, 7))  # its baseline has one of its own
    assert ratios([new, last, old]) == [expected, round(151.5 / 301.5, 3), 1]


def test_two_models_keep_their_own_baselines() -> None:
    big, big_new = model("big", 800, 8), model("big new", 400, 8)
    results = [build(OLD), build(NEW, OLD), build(big), build(big_new, big)]
    assert ratios(results) == [1, round(301.5 / 1501.5, 3), 1, round(601.5 / 1201.5, 3)]


@pytest.mark.parametrize("listed", ["nothing", "the baseline", "the baseline evaluated again"])
def test_a_row_has_the_same_ratio_whatever_else_is_listed(listed: str) -> None:
    """It is to the samples that it was evaluated against, also where another evaluation of the
    same name has a row; --baseline chooses that one.
    """
    again = build(model("old", 1100, 6))
    more = {"nothing": [], "the baseline": [build(OLD)], "the baseline evaluated again": [again]}
    new = build(NEW, OLD)
    row = compare([*more[listed], new]).rows[-1]
    assert row.blocks[OVERALL]["compression_ratio"] == new.overall.metrics["compression_ratio"]
    assert row.reference == ("old (not a row)" if more[listed] == [again] else "old")
    assert ratios([again, new], "old") == [1, round(301.5 / 1651.5, 3)]


@pytest.mark.parametrize("is_listed", [False, True])
def test_the_ratio_over_some_benchmarks_is_that_of_their_mean_tokens(is_listed: bool) -> None:
    names = ("gsm8k", "aime24", "math500")
    old, few = model("old", 1000, 6, names), build(model("few", 300, 5))
    results = [*([build(old)] if is_listed else []), few, build(model("new", 200, 7, names), old)]
    row = compare(results).rows[-1]
    assert row.blocks[OVERALL]["compression_ratio"].value == pytest.approx(301.5 / 1501.5)


def test_shared_benchmarks_alone_are_compared() -> None:
    few = build(model("few", 300, 5, ("aime24", "math500")))
    comparison = compare([build(OLD), few])
    assert comparison.blocks == ("aime24",)
    assert comparison.left_out == ("gsm8k", "math500")
    overall = comparison.rows[0].blocks[OVERALL]["mean_tokens"]
    assert (overall.value, overall.low) == (2001.5, None)
    assert comparison.rows[0].budgets[OVERALL][1][1]["mean_tokens"].value == 2001.5
    assert "left out: gsm8k, math500" in comparison.markdown()


def test_overall_over_a_subset_is_a_mean_over_that_subset() -> None:
    whole = build(model("whole", 100, 4, ("gsm8k", "aime24", "math500")))
    comparison = compare([whole, build(OLD)])
    overall = comparison.rows[0].blocks[OVERALL]
    assert overall["mean_tokens"].value == (101.5 + 201.5) / 2
    assert overall["efficiency"].value == pytest.approx(1e4 * 0.4 / 151.5)
    assert comparison.rows[1].blocks[OVERALL]["mean_tokens"].low is not None
    at_64, at_4096 = (at["mean_tokens"] for _, at in comparison.rows[0].budgets[OVERALL])
    assert (at_64.value, at_4096.value) == (64, 151.5)


def test_no_shared_benchmark_is_refused() -> None:
    with pytest.raises(UserError, match="no benchmark is in all results.*old: gsm8k, aime24; x: m"):
        compare([build(OLD), build(model("x", 9, 1, ("math500",)))])
    with pytest.raises(UserError, match="nothing to compare"):
        compare([])


def test_every_setting_that_differs_is_named() -> None:
    other = model(
        "new", 200, 7, samples=2, temperature=1.0, template={"name": "cod"}, engine="vllm 1"
    )
    comparison = compare([build(OLD), build(other), build(OLD)])
    assert set(comparison.differences) == {
        SettingDifference(name="temperature", values=("0.6", "1.0", "0.6")),
        SettingDifference(name="template.name", values=('"r1"', '"cod"', '"r1"')),
        SettingDifference(name="engine", values=(NOT_SET, '"vllm 1"', NOT_SET)),
        SettingDifference(name="gsm8k.samples_per_problem", values=("4", "2", "4")),
        SettingDifference(name="aime24.samples_per_problem", values=("4", "2", "4")),
    }
    assert "temperature: 0.6 (old, old (2)); 1.0 (new)" in comparison.describe_differences()
    assert '- engine: (not set) (old, old (2)); "vllm 1" (new)' in comparison.markdown()
    assert "GSM8K: 10 problems, N = 4 / 2" in comparison.markdown()


def test_the_table_says_where_intervals_are_too_narrow() -> None:
    few = compare([build(OLD)])
    note = "too narrow for so few problems as 10: at a nominal 95 %, about 84 % hold"
    assert note in few.markdown(intervals=True)
    assert "too narrow" not in few.markdown()
    assert "too narrow" not in replace(few, fewest_problems=60).markdown(intervals=True)


def test_how_intervals_were_made_is_a_setting() -> None:
    other = build_results(NEW, budgets=(), bootstrap=Bootstrap(num_resamples=50, seed=3))
    names = [found.name for found in compare([build(OLD), other]).differences]
    assert names == ["bootstrap.num_resamples", "bootstrap.seed"]


def test_points_and_curves() -> None:
    worse = build(model("worse", 1200, 6))
    comparison = compare([build(OLD), build(NEW), worse])
    overall = [row.blocks[OVERALL] for row in comparison.rows]
    values = [(block["mean_tokens"].value, block["accuracy"].value) for block in overall]
    assert [row.label for row in comparison.rows] == ["old", "new", "worse"]
    assert values == [(1501.5, 0.6), (301.5, 0.7), (1801.5, 0.6)]
    assert pareto_front(values) == {1}
    budgets, metrics = zip(*comparison.rows[1].budgets["gsm8k"], strict=True)
    assert budgets == BUDGETS
    assert [at["accuracy"].value for at in metrics] == [0, 0.7]
    assert [at["mean_tokens"].value for at in metrics] == [64, 201.5]
    assert metrics[0]["norm_std"].value == 0


def test_no_spread_of_lengths_is_shown_of_one_sample() -> None:
    one = build(model("one", 300, 6, samples=1))
    comparison = compare([build(OLD), one])
    of_old, of_one = (row.budgets[OVERALL][0][1] for row in comparison.rows)
    assert "norm_std" in of_old and "norm_std" not in of_one
    _, *lines = compare([one]).text().splitlines()
    assert [line.split()[-3:] for line in lines] == [["-", "0.0%", "0.0%"]] * 3
    assert any("NormStd" in plot for plot in plots_of_block(comparison.rows, OVERALL))
    assert not any("NormStd" in plot for plot in plots_of_block(compare([one]).rows, OVERALL))


@pytest.mark.parametrize("stored_by_an_earlier_version", [False, True])
def test_early_exit_has_no_budget_curve(stored_by_an_earlier_version: bool) -> None:
    """It tries answers by the room left: its samples, cut, are not those of a smaller limit."""
    early = build(model("early", 300, 6, method="deer"))
    assert early.overall.budgets == () == early.benchmarks["gsm8k"].budgets
    if stored_by_an_earlier_version:
        plain = build(model("early", 300, 6))
        early = plain.model_copy(update={"settings": plain.settings | {"method": "deer"}})
        assert early.overall.budgets
    comparison = compare([build(OLD), early])
    for block in comparison.blocks:
        assert [row.label for row in comparison.rows if row.budgets[block]] == ["old"]
    for text in (comparison.markdown(), comparison.text()):
        assert "No budget curve: early (early exit tries answers by the room left" in text
    assert not any("budget" in plot for plot in plots_of_block(compare([early]).rows, OVERALL))
    assert "No budget curve" not in compare([build(OLD)]).markdown()
