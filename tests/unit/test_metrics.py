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
    return {
        "step": step,
        "loss": 0.1 + 0.2 * step,
        "grad_norm": 1 / 3,
        "lr": 1e-7,
        "num_rollouts": 16,
        "num_accepted": 12,
        "accept_rate": 0.75,
        "accuracy": 0.8125,
        "mean_response_tokens": 33.3,
        "step_seconds": 0.5,
    }


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
    assert console[1].startswith("step 2/3  loss 0.5000  accuracy 0.812  tokens 33.3")


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path) -> None:
    log = _open(tmp_path)
    for step in (1, 2, 3):
        log.step(_step_metrics(step))
    log.close()
    log = _open(tmp_path, first_step=1)
    for step in (2, 3):
        log.step(_step_metrics(step))
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = events.Scalars("loss")
    assert [event.step for event in losses] == [1, 2, 3]
    assert losses[2].value == pytest.approx(0.7)


def test_what_wandb_refuses_at_the_start_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**settings: object) -> None:
        raise RuntimeError("api_key not configured\nsee ...")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(UserError, match=r"\(RuntimeError: api_key not configured\); see `wandb"):
        _open(tmp_path, tensorboard=False, wandb="online")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("the service is gone\ntraceback"), "ConnectionError: the service is gone"),
        (OSError(28, "No space left"), "OSError: [Errno 28] No space left"),
    ],
)
def test_a_writer_that_fails_does_not_end_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    reason: str,
) -> None:
    """It is left out with one warning; the others have every step, and all are closed."""

    def refuse(*args: object, **named: object) -> None:
        raise error

    run = SimpleNamespace(log=refuse, finish=refuse)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: run))
    log = _open(tmp_path, wandb="online")
    with caplog.at_level(logging.WARNING, "megatron_opsft"):
        for step in (1, 2):
            log.step(_step_metrics(step))
        log.close()
    (record,) = caplog.records
    assert record.getMessage() == f"Weights & Biases is left out from here on: {reason}"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2]


def test_a_resumed_run_goes_on_under_its_id_at_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, object]] = []

    def init(**settings: object) -> SimpleNamespace:
        started.append(settings)
        return SimpleNamespace(log=lambda *args, **named: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for first_step in (0, 1):
        log = _open(tmp_path, first_step, tensorboard=False, wandb="offline")
        log.step(_step_metrics(first_step + 1))
        log.close()
    first, again = (settings["id"] for settings in started)
    assert first == again and len(str(first)) == 32
    _open(tmp_path / "other", tensorboard=False, wandb="offline").close()
    assert started[-1]["id"] != first
    assert all(settings["resume"] == "allow" for settings in started)


SHOWN = ShownResponse(
    problem="What is 2 + 2?",
    gold="4",
    response="<think>\n2 + 2\n</think>\n" + "so it is " * 60 + "[4]",
    num_tokens=312,
    outcome="correct",
)


def test_samples_are_shown_cut_on_the_console_and_whole_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged: list[tuple[dict[str, object], int]] = []
    run = SimpleNamespace(
        log=lambda values, step: logged.append((values, step)), finish=lambda: None
    )
    wandb = SimpleNamespace(init=lambda **settings: run, Table=lambda **table: table)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = _open(tmp_path, wandb="offline")
    log.samples(2, [SHOWN])
    log.samples(3, [])
    log.close()
    problem, response = capsys.readouterr().out.splitlines()
    assert problem == "  for example: What is 2 + 2?"
    assert response.startswith("  -> <think> 2 + 2 </think> so it is")
    assert response.endswith("so it is [4] (312 tokens, correct, gold 4)")
    assert len(response) < 320
    ((values, step),) = logged
    assert step == 2
    assert values["samples"] == {
        "columns": ["problem", "gold", "response", "num_tokens", "outcome"],
        "data": [["What is 2 + 2?", "4", SHOWN.response, "312", "correct"]],
    }
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("sample_1/text_summary")
    assert text.step == 2
    whole = text.tensor_proto.string_val[0].decode()
    assert whole.count("so it is") == 60 and "    </think>" in whole


def test_no_sequence_of_a_response_reaches_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rogue = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    shown = {"problem": f"a{rogue}", "response": f"b\r{rogue}", "gold": f"c{rogue}"}
    log = _open(tmp_path)
    log.samples(2, [replace(SHOWN, **shown)])
    log.close()
    safe = r"\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    assert capsys.readouterr().out.splitlines() == [
        f"  for example: a{safe}",
        f"  -> b {safe} (312 tokens, correct, gold c{safe})",
    ]


def test_an_evaluation_of_several_sets_has_a_console_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = _open(tmp_path, tensorboard=False)
    one = {"eval_accuracy": 0.5, "eval_mean_response_tokens": 80.0, "eval_samples": 8}
    one["eval_truncated_share"] = 0.05
    two = {"eval_aime_accuracy": 0.25, "eval_aime_mean_response_tokens": 9.5}
    two |= {"eval_aime_truncated_share": 0.1, "eval_aime_samples": 30}
    log.evaluation({"step": 4, **one, **two}, ["aime"])
    log.evaluation({"step": 8, **one, **two}, ["aime"])
    log.close()
    assert capsys.readouterr().out.splitlines()[:2] == [
        "held-out after step 4: accuracy 0.500, 80.0 tokens, 5.0 % cut off (8 samples)",
        "aime after step 4: accuracy 0.250, 9.5 tokens, 10.0 % cut off (30 samples)",
    ]
    assert caplog.messages == [  # of the first evaluation, and of the set with more than 5 %
        "aime: 10.0 % of the responses were cut off, so accuracy and tokens are lower than the "
        "model's; raise eval.max_response_tokens"
    ]
