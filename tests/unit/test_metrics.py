"""The metrics log: exact floats in JSON lines, TensorBoard events, plain console lines."""

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_opsft.config import RunConfig
from megatron_opsft.errors import UserError
from megatron_opsft.preflight.run_directory import RunDir
from megatron_opsft.records import FinishReason, Outcome, Problem, Rollout, Verdict
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
    package = SimpleNamespace(init=lambda **settings: started.append(settings) or run)
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


def test_what_wandb_refuses_is_one_line_and_later_a_warning(
    tmp_path: Path, wandb: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """A writer that fails is left out; the others have every step, and all are closed."""

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
    wandb.package.init = refuse
    with pytest.raises(UserError, match=rf"\({reason}\); see `wandb login`"):
        _open(tmp_path, tensorboard=False, wandb="online")


def _shown(problem: str, gold: str, text: str) -> tuple[Problem, Rollout, Verdict]:
    rollout = Rollout(
        problem_id="p",
        prompt_ids=(1,),
        response_ids=(2,) * 312,
        text=text,
        finish_reason=FinishReason.STOP,
        weight_version=0,
    )
    return Problem(id="p", text=problem, answer=gold), rollout, Verdict(outcome=Outcome.CORRECT)


def test_responses_are_shown_without_their_middles_and_their_escape_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rogue = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    long = "<think>\n2 + 2\n</think>\n" + "so it is " * 60 + "[4]"
    log = _open(tmp_path, tensorboard=False)
    log.samples([_shown("What is 2 + 2?", "4", long)])
    log.samples([_shown(f"a{rogue}", f"c{rogue}", f"b\r{rogue}")])
    problem, response, *safe = capsys.readouterr().out.splitlines()
    assert problem == "  for example: What is 2 + 2?"
    assert response.startswith("  -> <think> 2 + 2 </think> so it is")
    assert response.endswith("so it is [4] (312 tokens, correct, gold 4)")
    assert len(response) < 320
    text = r"\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    assert safe == [
        f"  for example: a{text}",
        f"  -> b {text} (312 tokens, correct, gold c{text})",
    ]


def test_an_evaluation_of_several_sets_has_a_console_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = _open(tmp_path, tensorboard=False)
    line = {"eval_correct_tokens_tenth": 52, "eval_correct_tokens_half": 108}
    for key, *values in (("eval", 0.5, 80.0, 0.05, 8), ("eval_aime", 0.25, 9.5, 0.1, 30)):
        names = ("accuracy", "mean_response_tokens", "truncated_share", "samples")
        line |= {f"{key}_{n}": value for n, value in zip(names, values, strict=True)}
    for step in (4, 8):
        log.evaluation({"step": step, **line}, ["aime"])
    assert capsys.readouterr().out.splitlines()[:2] == [
        "held-out after step 4: accuracy 50.0 %, 80.0 tokens, 5.0 % cut off (8 samples); "
        "correct answers: p10 52, median 108 tokens",
        "aime after step 4: accuracy 25.0 %, 9.5 tokens, 10.0 % cut off (30 samples)",
    ]
    (said,) = caplog.messages  # of the first evaluation, and of the set with more than 5 %
    assert said.startswith("aime: 10.0 % of the responses were cut off")
