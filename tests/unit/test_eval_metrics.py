"""Metrics against implementations written here from the definitions; token budgets by hand; the
coverage of intervals. results.json: what it holds, that it is deterministic, and that a bad one is
named.
"""

import itertools
import math
import random
import statistics
from pathlib import Path

import numpy as np
import pytest
from eval_samples import Model, made_model, measure_samples, stored

from megatron_opsft.commands.evaluate.inputs import default_budgets
from megatron_opsft.commands.evaluate.metrics import (
    arrange,
    combine,
    draw_counts,
    estimate,
    mean_over_problems,
    measure,
    measure_at,
)
from megatron_opsft.commands.evaluate.results import build_results, read_results, to_json
from megatron_opsft.data.stored_samples import StoredSample
from megatron_opsft.errors import UserError
from megatron_opsft.records import Outcome

SILENT = (Outcome.NO_ANSWER, Outcome.UNFINISHED)


def sample(problem: str, index: int, tokens: int, correct: bool = False) -> StoredSample:
    others = (None, Outcome.NO_ANSWER, Outcome.TIMEOUT, Outcome.UNFINISHED)
    outcome = None if correct else others[tokens % 4]
    return stored(problem, index, tokens, correct, finished=tokens < 900, outcome=outcome)


def random_samples(seed: int, num_problems: int, num_samples: int) -> list[StoredSample]:
    rng = np.random.default_rng(seed)
    skill = rng.random(num_problems)
    return [
        sample(f"p{p}", n, int(rng.integers(1, 1000)), bool(rng.random() < skill[p]))
        for p in range(num_problems)
        for n in range(num_samples)
    ]


def by_definition(samples: list[StoredSample]) -> dict[str, float]:
    """Plain Python, a problem at a time; pass@k by listing all subsets of k samples."""
    problems: dict[str, list[StoredSample]] = {}
    for one in samples:
        problems.setdefault(one.problem_id, []).append(one)
    rows, fmean = list(problems.values()), statistics.fmean
    lengths = sorted(one.num_tokens for one in samples)
    num, n = len(samples), len(rows[0])
    expected = {
        "accuracy": sum(one.correct for one in samples) / num,
        "pass_at_n": sum(any(one.correct for one in row) for row in rows) / len(rows),
        "mean_tokens": sum(lengths) / num,
        "median_tokens": statistics.median(lengths),
        "truncated_share": sum(not one.finished for one in samples) / num,
        "no_answer_share": sum(one.outcome in SILENT for one in samples) / num,
    }
    if n > 1:  # of one length there is no spread
        tokens = [[one.num_tokens for one in row] for row in rows]
        expected["norm_std"] = fmean(statistics.pstdev(row) / fmean(row) for row in tokens)
    place = 0.95 * (num - 1)
    low, high = lengths[math.floor(place)], lengths[math.ceil(place)]
    expected["p95_tokens"] = low + (place - math.floor(place)) * (high - low)
    expected["efficiency"] = 100 * (100 * expected["accuracy"]) / expected["mean_tokens"]
    for k in sorted({k for k in (1, 2, 4, 8, 16) if k <= n} | {n}):
        subsets = [itertools.combinations([one.correct for one in row], k) for row in rows]
        expected[f"pass_at_{k}"] = fmean(fmean(map(any, each)) for each in subsets)
    return expected


@pytest.mark.parametrize(("problems", "samples"), [(1, 1), (23, 5), (40, 8)])
def test_metrics_match_definitions(problems: int, samples: int) -> None:
    drawn = random_samples(problems, problems, samples)
    assert measure_samples(drawn) == pytest.approx(by_definition(drawn), rel=1e-12)


def test_weights_are_copies_of_problems() -> None:
    """A resample's metrics are those of samples in which its problems really are repeated."""
    drawn = random_samples(3, 9, 4)
    grid = arrange(drawn)
    counts = np.array([[2, 0, 1, 0, 3, 0, 1, 1, 1], [9, 0, 0, 0, 0, 0, 0, 0, 0], [1] * 9])
    metrics = measure(grid, counts)
    for d, row in enumerate(counts):
        copies = [
            sample(f"{one.problem_id}.{copy}", one.sample_index, one.num_tokens, one.correct)
            for one in drawn
            for copy in range(row[int(one.problem_id[1:])])
        ]
        found = {name: value[d] for name, value in metrics.items()}
        assert found == pytest.approx(by_definition(copies))


def test_overall_is_the_mean_over_benchmarks_and_its_efficiency_a_ratio_of_means() -> None:
    many, few = random_samples(1, 30, 2), random_samples(2, 3, 8)
    metrics = [measure_samples(many), measure_samples(few)]
    overall = combine([{k: np.array([v]) for k, v in one.items()} for one in metrics])
    assert "pass_at_8" not in overall  # only one of them has it
    for name in ("accuracy", "pass_at_n", "pass_at_2", "mean_tokens", "p95_tokens", "norm_std"):
        assert overall[name][0] == pytest.approx((metrics[0][name] + metrics[1][name]) / 2)
    ratio = 1e4 * overall["accuracy"][0] / overall["mean_tokens"][0]
    assert overall["efficiency"][0] == pytest.approx(ratio)
    mean_of_ratios = (metrics[0]["efficiency"] + metrics[1]["efficiency"]) / 2
    assert abs(mean_of_ratios - ratio) > 1e-3


# Problem a: 100 right, 300 right. Problem b: 200 wrong, 400 cut off by the limit.
GRID = arrange(
    [stored("a", 0, 100, True), stored("a", 1, 300, True)]
    + [stored("b", 0, 200), stored("b", 1, 400, finished=False)]
)
BY_HAND = {
    # budget: accuracy, mean tokens, NormStd, truncated share
    99: (0 / 4, 99.0, 0.0, 4 / 4),
    100: (1 / 4, 100.0, 0.0, 3 / 4),
    299: (1 / 4, (100 + 299 + 200 + 299) / 4, (99.5 / 199.5 + 49.5 / 249.5) / 2, 2 / 4),
    300: (2 / 4, (100 + 300 + 200 + 300) / 4, (100 / 200 + 50 / 250) / 2, 1 / 4),
    400: (2 / 4, 250.0, (100 / 200 + 100 / 300) / 2, 1 / 4),
}


@pytest.mark.parametrize("budget", BY_HAND)
def test_budget_by_hand(budget: int) -> None:
    found = measure_at(GRID, budget, np.ones((1, 2), dtype=np.int64))
    names = ("accuracy", "mean_tokens", "norm_std", "truncated_share")
    expected = dict(zip(names, BY_HAND[budget], strict=True))
    expected["efficiency"] = 1e4 * expected["accuracy"] / expected["mean_tokens"]
    assert {name: value[0] for name, value in found.items()} == pytest.approx(expected)


def test_default_budgets() -> None:
    assert default_budgets(32768) == (1024, 2048, 4096, 8192, 16384, 32768)
    assert default_budgets(350) == (8, 16, 32, 64, 128, 256, 350)
    assert default_budgets(1) == (1,)


@pytest.mark.parametrize(
    ("problems", "least", "most"), [(5, 0.80, 0.88), (30, 0.90, 0.945), (60, 0.925, 0.96)]
)
def test_intervals_have_the_coverage_that_the_documentation_tells(
    problems: int, least: float, most: float
) -> None:
    """Of 95 % intervals, 2,000 evaluations of 8 samples; problems are of uniform difficulty, so
    that samples are not independent: resampling single ones would cover far less.
    """
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(2000):
        correct = rng.random((problems, 8)) < rng.random(problems)[:, None]
        counts = draw_counts(problems, "x", num_resamples=400, seed=trial)
        interval = estimate(mean_over_problems({"a": correct.mean(axis=1)}, counts)["a"])
        assert interval.low is not None and interval.high is not None
        covered += interval.low <= 0.5 <= interval.high
    assert least <= covered / 2000 <= most


BUDGETS = (128, 1000)


def model(name: str = "new", seed: int = 1, samples: int = 4) -> Model:
    sizes = {"zebra": 12, "aime24": 8, "gsm8k": 20}
    drawn = {each: random_samples(seed + n, n, samples) for each, n in sizes.items()}
    return name, drawn, {"temperature": 0.6, "data": {"b": 1, "a": [{"y": 2, "x": 3}]}}


NEW, OLD = model(), model("old", 30)


def test_values_are_the_metrics_of_the_samples() -> None:
    results = build_results(*NEW, baseline=OLD[:2], budgets=BUDGETS)
    assert list(results.benchmarks) == ["gsm8k", "aime24", "zebra"]
    for name, scores in results.benchmarks.items():
        own, base = (measure_samples(samples[name]) for _, samples, _ in (NEW, OLD))
        values = {metric: found.value for metric, found in scores.metrics.items()}
        ratio = own["mean_tokens"] / base["mean_tokens"]
        assert values == pytest.approx(own | {"compression_ratio": ratio})
        assert {m: d.value for m, d in scores.differences.items()} == pytest.approx(
            {metric: own[metric] - base[metric] for metric in own}, rel=1e-8, abs=1e-9
        )
        assert scores.budgets[-1].metrics["mean_tokens"] == scores.metrics["mean_tokens"]
        assert (scores.num_problems, scores.samples_per_problem) == (len(NEW[1][name]) // 4, 4)
    overall = results.overall.metrics
    for metric in ("accuracy", "mean_tokens", "norm_std", "pass_at_2"):
        each = [scores.metrics[metric].value for scores in results.benchmarks.values()]
        assert overall[metric].value == pytest.approx(sum(each) / 3)
    base_tokens = np.mean([measure_samples(samples)["mean_tokens"] for samples in OLD[1].values()])
    ratio = overall["mean_tokens"].value / base_tokens
    assert overall["compression_ratio"].value == pytest.approx(ratio)
    assert [point.budget for point in results.overall.budgets] == list(BUDGETS)


def test_a_model_against_itself_differs_by_nothing() -> None:
    results = build_results(*NEW, baseline=NEW[:2], budgets=())
    for block in results.blocks.values():
        ratio = block.metrics["compression_ratio"]
        assert (ratio.value, ratio.low, ratio.high) == (1, 1, 1)
        assert {(d.value, d.low, d.high) for d in block.differences.values()} == {(0, 0, 0)}


def test_pass_at_n_of_different_n_is_not_subtracted() -> None:
    results = build_results(*NEW, baseline=model(samples=2)[:2], budgets=())
    for block in results.blocks.values():
        found = {name for name in block.differences if name.startswith("pass_at_")}
        assert found == {"pass_at_1", "pass_at_2"}


def test_order_changes_no_byte_and_other_benchmarks_no_interval(tmp_path: Path) -> None:
    name, samples, settings = NEW
    results = build_results(*NEW, baseline=OLD[:2], budgets=BUDGETS)
    (tmp_path / "results.json").write_text(to_json(results))
    assert read_results(tmp_path) == results
    settings = {"data": {"a": [{"x": 3, "y": 2}], "b": 1}, "temperature": 0.6}
    for seed in range(3):
        mix = random.Random(seed)
        order = mix.sample(list(samples), 3)
        mixed = {each: mix.sample(samples[each], len(samples[each])) for each in order}
        again = build_results(name, mixed, settings, baseline=OLD[:2], budgets=BUDGETS)
        assert to_json(again) == to_json(results)
    own = {"aime24": samples["aime24"]}
    alone = build_results(name, own, settings, baseline=OLD[:2], budgets=BUDGETS)
    assert alone.benchmarks["aime24"] == results.benchmarks["aime24"]
    assert alone.overall.metrics == results.benchmarks["aime24"].metrics


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"schema_version": 1', '"schema_version": 2', "schema_version: Input should be 1"),
        ('"num_problems": 10', '"num_problems": "10"', "benchmarks.gsm8k.num_problems: "),
        ('"value": 0.5', '"value": NaN', "accuracy.value: .*finite"),
        ("", '{"schema_version": 1', "results: Invalid JSON"),
        ("", "[]", "results: .* an object"),
    ],
)
def test_a_bad_file_is_named_with_its_field(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(UserError, match=r"results\.json: not found"):
        read_results(tmp_path)
    text = to_json(build_results(*made_model("a", 9, 5), budgets=BUDGETS))
    (tmp_path / "results.json").write_text(text.replace(old, new, 1) if old else new)
    with pytest.raises(UserError, match=rf"results\.json: .*{message}") as caught:
        read_results(tmp_path)
    assert "\n" not in str(caught.value)
