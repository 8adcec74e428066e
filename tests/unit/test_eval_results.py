"""results.json: what it holds, that it is deterministic, and that a bad one is named."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eval_samples import Model, made_model, measure_samples, stored

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.benchmarks import StoredSample
from megatron_opsft.evaluate.results import build_results, read_results, to_json

BUDGETS = (128, 512)


def draw(seed: int, problems: int, samples: int, mean_tokens: float) -> list[StoredSample]:
    rng = np.random.default_rng(seed)
    lengths = [1 + int(min(511, rng.exponential(mean_tokens))) for _ in range(problems * samples)]
    return [
        stored(f"p{i // samples}", i % samples, n, n < 512 and rng.random() < 0.6, finished=n < 512)
        for i, n in enumerate(lengths)
    ]


def model(name: str = "new", tokens: float = 100, seed: int = 1, samples: int = 4) -> Model:
    drawn = {
        "zebra": draw(seed, 12, samples, tokens),
        "aime24": draw(seed + 50, 8, samples, 2 * tokens),
        "gsm8k": draw(seed + 70, 20, samples, tokens / 2),
    }
    return name, drawn, {"temperature": 0.6, "data": {"b": 1, "a": [{"y": 2, "x": 3}]}}


NEW, OLD = model(), model("old", 300, 2)


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


def changed(tree: Any, path: str, value: object) -> str:
    *keys, last = path.split(".")
    place = tree
    for key in keys:
        place = place[key]
    place[last] = value
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 2, "schema_version: Input should be 1"),
        ("benchmarks.gsm8k.num_problems", "20", "benchmarks.gsm8k.num_problems: "),
        ("overall.metrics.accuracy.value", float("nan"), "accuracy.value: .*finite"),
        ("", b'{"schema_version": 1', "results: Invalid JSON"),
        ("", b"[]", "results: .* an object"),
    ],
)
def test_a_bad_file_is_named_with_its_field(
    tmp_path: Path, path: str, value: Any, message: str
) -> None:
    with pytest.raises(UserError, match=r"results\.json: not found"):
        read_results(tmp_path)
    tree = json.loads(to_json(build_results(*made_model("a", 9, 5), budgets=BUDGETS)))
    text = changed(tree, path, value) if path else value.decode()
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match=rf"results\.json: .*{message}") as caught:
        read_results(tmp_path)
    assert "\n" not in str(caught.value)
