"""Which evaluation is the best, and which models of earlier ones stay."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from megatron_opsft.config import EvalConfig
from megatron_opsft.config.load import load_config
from megatron_opsft.records import Message
from megatron_opsft.run.record.summary import (
    card_of_adapter,
    card_of_best,
    model_card,
    summarize,
)
from megatron_opsft.run.record.written_models import drop_superseded
from megatron_opsft.run.run_files import best_evaluation, describe_best


def evaluations_of(measured: list[tuple[float, float]]) -> list[dict[str, float]]:
    """Lines of evals.jsonl of every fourth step. measured: their accuracy and tokens."""
    return [
        {"step": 4 * number, "eval_accuracy": accuracy, "eval_mean_response_tokens": tokens}
        for number, (accuracy, tokens) in enumerate(measured)
    ]


@pytest.mark.parametrize(
    ("measured", "best"),
    [
        ([], None),
        ([(0.8, 100)], 0),
        ([(0.8, 100), (0.79, 50)], 4),  # within 0.01 of the base model's
        ([(0.8, 100), (0.78, 50)], 0),  # short, but it loses too much
        ([(0.8, 100), (0.8, 60), (0.7, 10), (0.9, 70)], 4),
        ([(0.8, 100), (0.8, 60), (0.85, 60)], 8),  # as short, and more accurate
        ([(0.8, 100), (0.8, 60), (0.8, 60)], 4),  # equal: the earlier
        ([(0.8, 100), (0.95, 110)], 0),  # longer than the base model: not what is wanted
    ],
)
def test_the_shortest_that_loses_no_more_accuracy_than_allowed(
    measured: list[tuple[float, float]], best: int | None
) -> None:
    found = best_evaluation(evaluations_of(measured), EvalConfig(best_within=0.01 + 1e-12))
    assert found.get("step") == best


@pytest.mark.parametrize(
    ("measured", "best"),
    [
        ([], None),
        ([(0.8, 100), (0.79, 50)], 0),
        ([(0.8, 100), (0.95, 110), (0.9, 20)], 4),
        ([(0.8, 100), (0.8, 60)], 4),  # as accurate, and shorter
        ([(0.8, 100), (0.9, 60), (0.9, 60)], 4),  # equal: the earlier
    ],
)
def test_the_most_accurate_however_long(
    measured: list[tuple[float, float]], best: int | None
) -> None:
    found = best_evaluation(evaluations_of(measured), EvalConfig(best="accuracy"))
    assert found.get("step") == best


@pytest.mark.parametrize("best", ["shortest", "accuracy"])
def test_an_evaluation_that_was_replaced_as_the_best_never_is_the_best_again(
    best: Literal["shortest", "accuracy"],
) -> None:
    """So that its model can be removed: best/ has the newest."""
    settings, draw, replaced = EvalConfig(best=best, best_within=0.1), random.Random(7), 0
    for _ in range(200):
        measured = [(draw.randrange(6) / 10, draw.randrange(6)) for _ in range(9)]
        lines = evaluations_of(measured)
        steps = [best_evaluation(lines[:n], settings)["step"] for n in range(1, 10)]
        assert steps == sorted(steps)
        assert all(step in (steps[n - 1], 4 * n) for n, step in enumerate(steps) if n)
        replaced += len(set(steps)) > 2
    assert replaced > 20


@pytest.mark.parametrize(
    ("keys", "measured", "kept_step", "model", "said"),
    [
        ([], [(0.8, 100), (0.9, 60), (0.7, 50)], 4, "best/step_000004", "in run/best/step_000004"),
        ([], [(0.8, 100), (0.9, 60), (0.7, 50)], 0, None, "not kept: see eval.export_best"),
        ([], [(0.8, 100), (0.8, 60), (0.9, 50)], 0, "hf", "its model is in run/hf"),
        ([], [(0.8, 100), (0.8, 120)], 0, None, "the base model's, 100.0 tokens, accuracy 80.0 %"),
        (["eval.best=accuracy"], [(0.8, 100), (0.9, 120)], 4, "best/step_000004", "120.0 tokens"),
    ],
)
def test_summary_card_and_terminal_name_step_figures_rule_and_place(
    tmp_path: Path,
    keys: list[str],
    measured: list[tuple[float, float]],
    kept_step: int,
    model: str | None,
    said: str,
) -> None:
    words = ["model.path=m", "data.train=d", "eval.data=e", f"run.dir={tmp_path}", *keys]
    config = load_config(None, words)
    lines = [{**line, "eval_samples": 4} for line in evaluations_of(measured)]
    summary = summarize(config, lines, 8, 8, kept_step)
    best = summary["best"]
    rule = "the fewest tokens with an accuracy at most 1 point below the base model's"
    if keys:
        rule = "the highest accuracy"
    assert best["rule"] == f"eval.best={config.eval.best}: {rule}"
    assert best["model"] == model
    told = describe_best(best, Path("run"))
    assert said in told and f"({best['rule']})" in told
    card = model_card(summary, config, [], "")
    tokens, accuracy = best["mean_response_tokens"], 100 * best["accuracy"]
    figures = f"after {best['step']} steps, {tokens:.1f} tokens, accuracy {accuracy:.1f} %."
    assert f"\n\nThe best evaluation, by {rule}: {figures}\n\n```python" in card


def test_the_card_of_a_kept_model_has_step_rule_and_its_own_figures(tmp_path: Path) -> None:
    """Not those of the evaluations around it."""
    words = ["model.path=m", "data.train=d", "eval.data=e", f"run.dir={tmp_path}"]
    words += ["export.push_to_hub=me/last"]
    config = load_config(None, words)
    measured = [(0.8, 100.0), (0.7, 90.0), (0.9, 60.0)]
    lines = [{**line, "eval_samples": 40} for line in evaluations_of(measured)]
    card = card_of_best(lines, config, [], "the prompt")
    assert f"\n# {tmp_path.name}, step_000008\n" in card
    assert "m after 8 steps of `on_policy_sft` on d." in card
    assert "| mean response tokens | 100.0 | 60.0 |\n| accuracy | 80.0 % | 90.0 % |" in card
    assert "Accuracy: +10.0 points; n = 40 responses at each end" in card
    rule = "the fewest tokens with an accuracy at most 1 point below the base model's"
    assert (
        f"\n\nChosen after step 8 as the best of 3 evaluations until then, by {rule} "
        "(`eval.best=shortest`).\n\n```python"
    ) in card
    assert f'pipeline("text-generation", "{tmp_path}/best/step_000008")' in card
    assert "70.0 %" not in card and "me/last" not in card and "the prompt" in card


def test_the_card_of_an_adapter_names_its_base_and_how_it_is_loaded(tmp_path: Path) -> None:
    """Of the last model and of one in best/; all else is as in the card of the merged model."""
    words = ["model.path=m", "data.train=d", f"run.dir={tmp_path}", "lora.rank=8"]
    config = load_config(None, [*words, "export.push_to_hub=me/last"])
    lines = [{**line, "eval_samples": 4} for line in evaluations_of([(0.8, 100), (0.9, 60)])]
    for card in (
        model_card(summarize(config, lines, 4, 4), config, [Message("user", 'a "")\n')], "p"),
        card_of_best(lines, config, [], "p"),
    ):
        adapter = card_of_adapter(card, "org/base", tmp_path / "adapter").splitlines()
        merged = card.splitlines()
        header, loads = adapter.index("library_name: peft"), adapter.index("```python")
        assert adapter[: header + 1] == ["---", 'base_model: "org/base"', "library_name: peft"]
        code = adapter[loads + 1 : loads + 7]
        assert code[0] == "from peft import AutoPeftModelForCausalLM"
        assert code[3] == f'model = AutoPeftModelForCausalLM.from_pretrained("{tmp_path}/adapter")'
        assert code[4] == 'tokenizer = AutoTokenizer.from_pretrained("org/base")'
        same = merged.index("messages = [")
        assert adapter[header + 1 : loads + 1] == merged[2 : merged.index("```python") + 1]
        assert adapter[loads + 7 :] == merged[same:] and "me/last" not in "".join(adapter)


@pytest.mark.parametrize(("samples", "is_sure"), [(128, True), (2, False)])
def test_a_card_says_that_the_model_got_worse_unless_it_may_be_chance(
    tmp_path: Path, samples: int, is_sure: bool
) -> None:
    words = ["model.path=m", "data.train=d", "eval.data=e", f"run.dir={tmp_path}"]
    config = load_config(None, words)
    lines = [
        {**line, "eval_samples": samples} for line in evaluations_of([(1.0, 118.3), (0.5, 350.0)])
    ]
    card = model_card(summarize(config, lines, 4, 4), config, [], "")
    decline = "THE MODEL GOT WORSE: held-out accuracy fell from 100.0 % to 50.0 %, more than chance"
    assert (f"\n\n**{decline}.**\n\nThe best evaluation" in card) == is_sure
    assert ("GOT WORSE" in card) == is_sure
    assert ("95 % interval -58.7 to -41.3 points.\n" in card) == is_sure
    # A run that hands out its best model does not say it of that one.
    card = model_card(summarize(config, lines, 8, 4), config, [], "")
    assert "GOT WORSE" not in card


def test_a_card_without_evaluations_names_no_best_one(tmp_path: Path) -> None:
    config = load_config(None, ["model.path=m", "data.train=d", f"run.dir={tmp_path}"])
    card = model_card(summarize(config, [], 8, 8), config, [], "")
    assert "best evaluation" not in card and "| accuracy | - | - |\n\n```python" in card


@pytest.mark.parametrize(
    ("every", "saved", "step", "finished", "kept"),
    [
        (0, [], 5, False, [4]),  # a run that is resumed begins anew
        (4, [4], 9, False, [4, 7, 9]),  # the checkpoint of step 8 is being written
        (4, [], 5, False, [4]),
        (2, [2, 4], 5, False, [1, 4]),
        (4, [4, 8], 9, True, [9]),
    ],
)
def test_of_superseded_models_those_stay_that_a_resumed_run_needs(
    tmp_path: Path, every: int, saved: list[int], step: int, finished: bool, kept: list[int]
) -> None:
    made = [f"best/step_{number:06d}/a" for number in (1, 3, 4, 7, 9) if number <= step]
    made += [f"checkpoints/step_{number:06d}/complete.json" for number in saved]
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    run, checkpoint = SimpleNamespace(dir=tmp_path), SimpleNamespace(every=every)
    config = SimpleNamespace(run=run, checkpoint=checkpoint)
    session: Any = SimpleNamespace(config=config, layout=SimpleNamespace(is_main=True))
    drop_superseded(session, step, finished=finished)
    found = sorted(path.name for path in (tmp_path / "best").iterdir())
    assert found == [f"step_{number:06d}" for number in kept]
