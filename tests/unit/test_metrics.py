"""The metrics log: exact floats in JSON lines, TensorBoard events, plain console lines."""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_opsft.config import RunConfig
from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.held_out import ShownResponse
from megatron_opsft.preflight.run_directory import RunDir
from megatron_opsft.run.metrics import MetricsLog


def _step_metrics(step: int) -> dict[str, float | int]:
    counts = {"step": step, "num_rollouts": 16, "num_accepted": 12}
    floats = {"loss": 0.1 + 0.2 * step, "grad_norm": 1 / 3, "lr": 1e-7, "accuracy": 0.8125}
    return counts | floats | {"mean_response_tokens": 33.3, "step_seconds": 0.5}


def _events(path: Path) -> EventAccumulator:
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    return events


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A run of the package in its place, and the settings that each was started with."""
    run = SimpleNamespace(log=lambda *args, **named: None, finish=lambda: None)
    started: list[dict[str, object]] = []
    package = SimpleNamespace(
        init=lambda **settings: started.append(settings) or run, Table=lambda **table: table
    )
    monkeypatch.setitem(sys.modules, "wandb", package)
    return SimpleNamespace(run=run, started=started, package=package)


def _open(path: Path, first_step: int = 0, **config: object) -> MetricsLog:
    run_dir = RunDir(path)
    run_dir.open(resume=True, overwrite=False)
    run_dir.write_manifest({})
    return MetricsLog(run_dir, RunConfig(dir=path, steps=3, **config), first_step=first_step)


def test_json_lines_read_back_as_the_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = _open(tmp_path, tensorboard=False)
    for step in (1, 2):
        log.step(_step_metrics(step))
        # Each line is on disk before the next step begins.
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [_step_metrics(n + 1) for n in range(step)]
        assert list(json.loads(lines[-1])) == list(_step_metrics(step))
    log.close()
    console = capsys.readouterr().out.splitlines()
    assert len(console) == 2
    assert console[1].startswith("step 2/3  loss 0.5000  accuracy 81.2 %  tokens 33.3")


def test_a_resumed_run_goes_on_at_tensorboard_and_wandb(
    tmp_path: Path, wandb: SimpleNamespace
) -> None:
    for path, steps in ((tmp_path, (1, 2, 3)), (tmp_path, (2, 3)), (tmp_path / "other", (1,))):
        log = _open(path, steps[0] - 1, wandb="offline")
        for step in steps:
            log.step(_step_metrics(step))
        log.close()
    losses = _events(tmp_path).Scalars("loss")
    assert [event.step for event in losses] == [1, 2, 3]
    assert losses[2].value == pytest.approx(0.7)
    first, again, other = (settings["id"] for settings in wandb.started)
    assert first == again != other and len(str(first)) == 32
    assert all(settings["resume"] == "allow" for settings in wandb.started)


def test_what_wandb_refuses_at_the_start_is_one_line(
    tmp_path: Path, wandb: SimpleNamespace
) -> None:
    def init(**settings: object) -> None:
        raise RuntimeError("api_key not configured\nsee ...")

    wandb.package.init = init
    with pytest.raises(UserError, match=r"\(RuntimeError: api_key not configured\); see `wandb"):
        _open(tmp_path, tensorboard=False, wandb="online")


def test_a_writer_that_fails_does_not_end_the_run(
    tmp_path: Path, wandb: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left out with one warning; the others have every step, and all are closed."""

    def refuse(*args: object, **named: object) -> None:
        raise ConnectionError("the service is gone\ntraceback")

    wandb.run.log = wandb.run.finish = refuse
    log = _open(tmp_path, wandb="online")
    with caplog.at_level(logging.WARNING, "megatron_opsft"):
        for step in (1, 2):
            log.step(_step_metrics(step))
        log.close()
    (said,) = caplog.messages
    reason = "ConnectionError: the service is gone"
    assert said == f"nothing more is written to Weights & Biases: {reason}"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert [event.step for event in _events(tmp_path).Scalars("loss")] == [1, 2]


SHOWN = ShownResponse(
    problem="What is 2 + 2?",
    gold="4",
    response="<think>\n2 + 2\n</think>\n" + "so it is " * 60 + "[4]",
    num_tokens=312,
    outcome="correct",
)


def test_samples_are_shown_cut_on_the_console_and_whole_elsewhere(
    tmp_path: Path, wandb: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """... and no sequence of a response reaches the terminal."""
    logged: list[tuple[dict[str, object], int]] = []
    wandb.run.log = lambda values, step: logged.append((values, step))
    rogue = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    log = _open(tmp_path, wandb="offline")
    log.samples(2, [SHOWN])
    log.samples(3, [])
    log.samples(4, [replace(SHOWN, problem=f"a{rogue}", response=f"b\r{rogue}", gold=f"c{rogue}")])
    log.close()
    problem, response, *safe = capsys.readouterr().out.splitlines()
    assert problem == "  for example: What is 2 + 2?"
    assert response.startswith("  -> <think> 2 + 2 </think> so it is")
    assert response.endswith("so it is [4] (312 tokens, correct, gold 4)")
    assert len(response) < 320
    shown = r"\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    assert safe == [
        f"  for example: a{shown}",
        f"  -> b {shown} (312 tokens, correct, gold c{shown})",
    ]
    (values, step), _ = logged
    assert step == 2
    assert values["samples"] == {
        "columns": ["problem", "gold", "response", "num_tokens", "outcome"],
        "data": [["What is 2 + 2?", "4", SHOWN.response, "312", "correct"]],
    }
    text, _ = _events(tmp_path).Tensors("sample_1/text_summary")
    assert text.step == 2
    whole = text.tensor_proto.string_val[0].decode()
    assert whole.count("so it is") == 60 and "    </think>" in whole


def test_an_evaluation_of_several_sets_has_a_console_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = _open(tmp_path, tensorboard=False)
    one = {"eval_accuracy": 0.5, "eval_mean_response_tokens": 80.0, "eval_samples": 8}
    one |= {"eval_truncated_share": 0.05, "eval_correct_tokens_tenth": 52}
    one["eval_correct_tokens_half"] = 108
    two = {"eval_aime_accuracy": 0.25, "eval_aime_mean_response_tokens": 9.5}
    two |= {"eval_aime_truncated_share": 0.1, "eval_aime_samples": 30}
    log.evaluation({"step": 4, **one, **two}, ["aime"])
    log.evaluation({"step": 8, **one, **two}, ["aime"])
    log.close()
    assert capsys.readouterr().out.splitlines()[:2] == [
        "held-out after step 4: accuracy 50.0 %, 80.0 tokens, 5.0 % cut off (8 samples); "
        "correct answers: p10 52, median 108 tokens",
        "aime after step 4: accuracy 25.0 %, 9.5 tokens, 10.0 % cut off (30 samples)",
    ]
    (said,) = caplog.messages  # of the first evaluation, and of the set with more than 5 %
    assert said.startswith("aime: 10.0 % of the responses were cut off")
