"""results.json: what it holds, that it is deterministic, and that a bad one is named."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from eval_samples import measure_samples, stored

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.benchmarks import StoredSample
from megatron_opsft.evaluate.results import (
    ModelSamples,
    build_results,
    read_results,
    to_json,
)
from megatron_opsft.records import Outcome

BUDGETS = (128, 512)


def draw(seed: int, problems: int, samples: int, mean_tokens: float) -> list[StoredSample]:
    rng = np.random.default_rng(seed)
    found = []
    for p in range(problems):
        for n in range(samples):
            tokens = 1 + int(min(511, rng.exponential(mean_tokens)))
            correct, finished = bool(tokens < 512 and rng.random() < 0.6), tokens < 512
            outcome = None if finished else Outcome.UNFINISHED
            found.append(stored(f"p{p}", n, tokens, correct, finished=finished, outcome=outcome))
    return found


def model(name: str = "new", tokens: float = 100, seed: int = 1, samples: int = 4) -> ModelSamples:
    return ModelSamples(
        name=name,
        samples={
            "zebra": draw(seed, 12, samples, tokens),
            "aime24": draw(seed + 50, 8, samples, 2 * tokens),
            "gsm8k": draw(seed + 70, 20, samples, tokens / 2),
        },
        settings={"temperature": 0.6, "data": {"b": 1, "a": [{"y": 2, "x": 3}]}},
    )


def test_values_are_the_metrics_of_the_samples() -> None:
    new, old = model(), model("old", 300, 2)
    results = build_results(new, baseline=old, budgets=BUDGETS)
    assert list(results.benchmarks) == ["gsm8k", "aime24", "zebra"]
    for name, scores in results.benchmarks.items():
        own, base = measure_samples(new.samples[name]), measure_samples(old.samples[name])
        values = {metric: found.value for metric, found in scores.metrics.items()}
        ratio = own["mean_tokens"] / base["mean_tokens"]
        assert values == pytest.approx(own | {"compression_ratio": ratio})
        assert {m: d.value for m, d in scores.differences.items()} == pytest.approx(
            {metric: own[metric] - base[metric] for metric in own}, rel=1e-8, abs=1e-9
        )
        assert scores.budgets[-1].metrics["mean_tokens"] == scores.metrics["mean_tokens"]
        assert (scores.num_problems, scores.samples_per_problem) == (
            len(new.samples[name]) // 4,
            4,
        )
    overall = results.overall.metrics
    for metric in ("accuracy", "mean_tokens", "norm_std", "pass_at_2"):
        each = [scores.metrics[metric].value for scores in results.benchmarks.values()]
        assert overall[metric].value == pytest.approx(sum(each) / 3)
    base_tokens = np.mean([measure_samples(s)["mean_tokens"] for s in old.samples.values()])
    ratio = overall["mean_tokens"].value / base_tokens
    assert overall["compression_ratio"].value == pytest.approx(ratio)
    assert [point.budget for point in results.overall.budgets] == list(BUDGETS)


def test_a_model_against_itself_differs_by_nothing() -> None:
    results = build_results(model(), baseline=model(), budgets=())
    for scores in (results.overall, *results.benchmarks.values()):
        ratio = scores.metrics["compression_ratio"]
        assert (ratio.value, ratio.low, ratio.high) == (1, 1, 1)
        for difference in scores.differences.values():
            assert (difference.value, difference.low, difference.high) == (0, 0, 0)


def test_pass_at_n_of_different_n_is_not_subtracted() -> None:
    results = build_results(model(), baseline=model(samples=2), budgets=())
    for scores in (results.overall, *results.benchmarks.values()):
        assert "pass_at_n" not in scores.differences
        assert "pass_at_2" in scores.differences
        assert "pass_at_4" not in scores.differences


def test_order_of_samples_benchmarks_and_settings_changes_no_byte(tmp_path: Path) -> None:
    first, base = model(), model("old", 300, 2)
    text = to_json(build_results(first, baseline=base, budgets=BUDGETS))
    for seed in range(3):
        shuffle = random.Random(seed)
        other = ModelSamples(
            name=first.name,
            samples={
                name: shuffle.sample(first.samples[name], len(first.samples[name]))
                for name in shuffle.sample(list(first.samples), 3)
            },
            settings={"data": {"a": [{"x": 3, "y": 2}], "b": 1}, "temperature": 0.6},
        )
        again = build_results(other, baseline=base, budgets=BUDGETS)
        assert to_json(again) == text
    results = build_results(first, baseline=base, budgets=BUDGETS)
    (tmp_path / "results.json").write_text(to_json(results))
    assert read_results(tmp_path) == results


def test_an_interval_does_not_depend_on_the_other_benchmarks() -> None:
    whole = build_results(model(), budgets=BUDGETS)
    one = ModelSamples(
        name="new", samples={"aime24": model().samples["aime24"]}, settings=model().settings
    )
    alone = build_results(one, budgets=BUDGETS)
    assert alone.benchmarks["aime24"] == whole.benchmarks["aime24"]
    assert alone.overall.metrics == whole.benchmarks["aime24"].metrics


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema_version"], 2, "schema_version: Input should be 1"),
        (["benchmarks", "gsm8k", "num_problems"], "20", "benchmarks.gsm8k.num_problems: "),
        (["overall", "metrics", "accuracy", "low"], 2.0, "accuracy: .*low 2.0 is above high"),
        (["overall", "metrics", "accuracy", "value"], float("nan"), "accuracy.value: .*finite"),
    ],
)
def test_a_bad_file_is_named_with_its_field(
    tmp_path: Path, path: list[str | int], value: object, message: str
) -> None:
    tree = json.loads(to_json(build_results(model(), budgets=BUDGETS)))
    place = tree
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file = tmp_path / "results.json"
    file.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=rf"results\.json: .*{message}") as caught:
        read_results(file)
    assert "\n" not in str(caught.value)
    for data, reason in ((b'{"schema_version": 1', "Invalid JSON"), (b"[]", ".* an object")):
        file.write_bytes(data)
        with pytest.raises(UserError, match=rf"results\.json: results: {reason}"):
            read_results(file)
    file.unlink()
    with pytest.raises(UserError, match=r"results\.json: not found"):
        read_results(tmp_path)
