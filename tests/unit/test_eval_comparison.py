"""Several results side by side: rows, baselines, settings that differ, figures' data."""

from pathlib import Path

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.bootstrap import Bootstrap
from megatron_opsft.evaluate.comparison import compare
from megatron_opsft.evaluate.metrics import ScoredSample
from megatron_opsft.evaluate.outputs import compare_directories
from megatron_opsft.evaluate.results import (
    ModelSamples,
    Results,
    build_results,
    write_results,
)
from megatron_opsft.report.page.tables import pareto_front, plots_of_block
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
    blocks = comparison.rows[1].blocks
    assert blocks["gsm8k"] == new.benchmarks["gsm8k"].metrics
    assert blocks[OVERALL] == new.overall.metrics
    assert blocks[OVERALL]["compression_ratio"].low is not None
    assert comparison.notes == ()
    assert "In brackets: 95 % intervals" in comparison.markdown()
    assert "Baseline: old." in comparison.markdown()


def test_compression_ratio_is_against_the_first_row_or_the_named_one() -> None:
    old, new, other = build(OLD), build(NEW, OLD), build(model("other", 500, 5))
    expected = round(301.5 / 1501.5, 3)
    assert ratios([old, new]) == ratios([old, build(NEW)]) == [1, expected]
    assert ratios([new, old]) == [1, round(1501.5 / 301.5, 3)]
    assert ratios([new, old, other], "old") == [expected, 1, round(751.5 / 1501.5, 3)]
    with pytest.raises(UserError, match="baseline nobody: there are old, new"):
        ratios([old, new], "nobody")


def test_a_result_alone_keeps_the_ratio_that_it_was_evaluated_with() -> None:
    assert ratios([build(OLD)]) == [None]
    assert ratios([build(NEW, OLD)]) == [round(301.5 / 1501.5, 3)]
    assert "Baseline: old." in compare([build(NEW, OLD)]).markdown()


def test_an_interval_of_a_ratio_is_that_of_these_samples_alone() -> None:
    """Another evaluation of the same name is another baseline."""
    new = build(NEW, OLD)
    again = compare([build(model("old", 1100, 6)), new]).rows[1].blocks[OVERALL]
    ratio = again["compression_ratio"]
    assert (ratio.value, ratio.low) == (pytest.approx(301.5 / 1651.5), None)


def test_models_of_one_name_are_numbered() -> None:
    old, new = build(model("hf", 1000, 6)), build(model("hf", 200, 7), model("hf", 1000, 6))
    expected = round(301.5 / 1501.5, 3)
    assert [row.label for row in compare([new, old]).rows] == ["hf", "hf (2)"]
    assert ratios([new, old], "hf (2)") == [expected, 1]
    assert "Baseline: hf (2)." in compare([new, old], baseline="hf (2)").markdown()


def test_the_ratio_over_some_benchmarks_is_that_of_their_mean_tokens() -> None:
    names = ("gsm8k", "aime24", "math500")
    old, few = model("old", 1000, 6, names), build(model("few", 300, 5))
    results = [build(old), few, build(model("new", 200, 7, names), old)]
    row = compare(results).rows[-1]
    assert row.blocks[OVERALL]["compression_ratio"].value == pytest.approx(301.5 / 1501.5)


def test_shared_benchmarks_alone_are_compared() -> None:
    few = build(model("few", 300, 5, ("aime24", "math500")))
    comparison = compare([build(OLD), few])
    assert comparison.blocks == ("aime24",)
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
    assert set(comparison.notes) == {
        "differs: temperature: 0.6 (old, old (2)); 1.0 (new)",
        'differs: template.name: "r1" (old, old (2)); "cod" (new)',
        'differs: engine: (not set) (old, old (2)); "vllm 1" (new)',
        "differs: gsm8k.samples_per_problem: 4 (old, old (2)); 2 (new)",
        "differs: aime24.samples_per_problem: 4 (old, old (2)); 2 (new)",
    }
    assert '- differs: engine: (not set) (old, old (2)); "vllm 1" (new)' in comparison.markdown()
    assert "differs: temperature: 0.6" in comparison.text()
    assert "GSM8K: 10 problems, N = 4 / 2" in comparison.markdown()


def test_the_table_says_where_intervals_are_too_narrow() -> None:
    few = build(OLD)
    note = "too narrow for so few problems as 10: at a nominal 95 %, about 84 % hold"
    assert note in compare([few]).markdown()
    enough = {
        name: block.model_copy(update={"num_problems": 60})
        for name, block in few.benchmarks.items()
    }
    assert "too narrow" not in compare([few.model_copy(update={"benchmarks": enough})]).markdown()


def test_how_intervals_were_made_is_a_setting() -> None:
    other = build_results(NEW, budgets=(), bootstrap=Bootstrap(num_resamples=50, seed=3))
    resamples, seed = compare([build(OLD), other]).notes
    assert resamples.startswith("differs: bootstrap.num_resamples: 100 (old)")
    assert seed == "differs: bootstrap.seed: 0 (old); 3 (new)"


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


def test_early_exit_has_no_budget_curve() -> None:
    """It tries answers by the room left: its samples, cut, are not those of a smaller limit."""
    early = build(model("early", 300, 6, method="deer"))
    assert early.overall.budgets == () == early.benchmarks["gsm8k"].budgets
    comparison = compare([build(OLD), early])
    for block in comparison.blocks:
        assert [row.label for row in comparison.rows if row.budgets[block]] == ["old"]
    for text in (comparison.markdown(), comparison.text()):
        assert "no budget curve: early (early exit tries answers by the room left" in text
    assert not any("budget" in plot for plot in plots_of_block(compare([early]).rows, OVERALL))
    assert "no budget curve" not in compare([build(OLD)]).markdown()


def test_an_earlier_comparison_is_replaced_only_when_asked_to(tmp_path: Path) -> None:
    for name, own in (("a", OLD), ("b", NEW)):
        (tmp_path / name).mkdir()
        write_results(tmp_path / name / "results.json", build(own))
    both, out = [tmp_path / "a", tmp_path / "b"], tmp_path / "out"
    compare_directories(both, out, None)
    before = (out / "table.md").read_text()
    with pytest.raises(UserError, match="holds a table.md already.*--overwrite"):
        compare_directories(both[::-1], out, None)
    assert (out / "table.md").read_text() == before
    compare_directories(both[::-1], out, None, overwrite=True)
    assert (out / "table.md").read_text() != before
