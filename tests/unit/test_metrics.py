"""The metrics log, its services and console lines; what a run says of steps that accept little."""

import gzip
import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked_cli import ROOT, ForkedCli
from responses import rollout_of
from small_run import QUICKSTART, SMALL_RUN
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_opsft.config import Config, RunConfig
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.records import Outcome, Problem, Verdict
from megatron_opsft.run.record.advice import (
    advise_on_base,
    explain_cut_off,
    explain_empty_step,
    explain_few_accepted,
    explain_left_out,
    explain_slow_judge,
    measure_correct,
)
from megatron_opsft.run.record.ending import (
    closing_lines,
    describe_early_end,
    warn_of_decline,
    worse_in_a_row,
)
from megatron_opsft.run.record.metrics import MetricsLog, describe_sample
from megatron_opsft.run.record.time_left import TimeLeft
from megatron_opsft.run.start.run_directory import RunDir
from megatron_opsft.runtime.console import say


def _step_metrics(step: int) -> dict[str, float | int]:
    line = {"step": step, "num_rollouts": 16, "num_accepted": 12, "loss": 0.1 + 0.2 * step}
    line |= {"grad_norm": 1 / 3, "lr": 1e-7, "accuracy": 0.8125}
    return line | {"mean_response_tokens": 33.3, "step_seconds": 0.5}


def _curves(path: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard has: tag -> step -> value."""
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def _losses(path: Path) -> dict[int, float]:
    return _curves(path)["training/loss"]


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
    given = {"dir": path, "steps": 3, "tensorboard": False} | config
    return MetricsLog(RunConfig(**given), first_step=first_step)


def test_numbers_are_read_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = _open(tmp_path)
    for step in (1, 2):
        log.write_step(_step_metrics(step))
        # Each line is on disk before the next step begins.
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [_step_metrics(n + 1) for n in range(step)]
        assert list(json.loads(lines[-1])) == list(_step_metrics(step))
    _, second = capsys.readouterr().out.splitlines()
    assert second.startswith("step 2/3  loss 0.5000  accuracy 81.2 %  tokens 33.3")


def test_tensorboard_and_wandb_go_on_with_a_run(tmp_path: Path, wandb: SimpleNamespace) -> None:
    for path, steps in ((tmp_path, (1, 2, 3)), (tmp_path, (2, 3)), (tmp_path / "other", (1,))):
        log = _open(path, steps[0] - 1, wandb="offline", tensorboard=True)
        for step in steps:
            log.write_step(_step_metrics(step))
        log.close()
    assert _losses(tmp_path) == pytest.approx({1: 0.3, 2: 0.5, 3: 0.7})
    first, again, other = (settings["id"] for settings in wandb.started)
    assert first == again != other and len(str(first)) == 32
    assert all(settings["resume"] == "allow" for settings in wandb.started)


def test_tensorboard_groups_what_belongs_together(tmp_path: Path) -> None:
    log = _open(tmp_path, tensorboard=True)
    log.write_step(
        _step_metrics(1) | {"mean_doubts": 2.5, "num_unclosed_think": 1, "verify_seconds": 0.25}
    )
    log.write_evaluation(
        {
            "step": 1,
            **{f"eval_{key}": 0.5 for key in ("accuracy", "mean_response_tokens")},
            **{"eval_truncated_share": 0.25, "eval_samples": 4, "eval_seconds": 0.5},
            **{"eval_after_right_share": 0.5, "eval_hard_mean_doubts": 0.5},
        }
    )
    log.close()
    assert sorted(_curves(tmp_path)) == [
        "eval/eval_accuracy",
        "eval/eval_mean_response_tokens",
        "eval/eval_samples",
        "eval/eval_truncated_share",
        "eval_overthinking/eval_after_right_share",
        "eval_overthinking/eval_hard_mean_doubts",
        "overthinking/mean_doubts",
        "overthinking/num_unclosed_think",
        "responses/accuracy",
        "responses/mean_response_tokens",
        "responses/num_accepted",
        "responses/num_rollouts",
        "seconds/eval_seconds",
        "seconds/step_seconds",
        "seconds/verify_seconds",
        "training/grad_norm",
        "training/loss",
        "training/lr",
    ]


def test_tensorboard_draws_no_curve_of_zeros_and_none_without_its_zeros(tmp_path: Path) -> None:
    log = _open(tmp_path, tensorboard=True)
    for step, (wrong, errors) in enumerate([(0, 0), (0, 0), (3, 0), (0, 0)], start=1):
        log.write_step(_step_metrics(step) | {"num_wrong": wrong, "verify_errors": errors})
    log.close()
    curves = _curves(tmp_path)
    assert curves["responses/num_wrong"] == {1: 0, 2: 0, 3: 3, 4: 0}
    assert "responses/verify_errors" not in curves
    assert '"verify_errors": 0' in (tmp_path / "metrics.jsonl").read_text()


def test_what_wandb_refuses_is_one_line_and_later_a_warning(
    tmp_path: Path, wandb: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """A writer that fails is left out; the others have every step, and all are closed."""

    def refuse(*args: object, **named: object) -> None:
        raise ConnectionError("the service is gone\ntraceback")

    wandb.run.log = wandb.run.finish = refuse
    log = _open(tmp_path, wandb="online", tensorboard=True)
    with caplog.at_level(logging.WARNING, "megatron_opsft"):
        for step in (1, 2):
            log.write_step(_step_metrics(step))
        log.close()
    reason = "ConnectionError: the service is gone"
    assert caplog.messages == [f"nothing more is written to Weights & Biases: {reason}"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert list(_losses(tmp_path)) == [1, 2]
    wandb.package.init = refuse
    with pytest.raises(UserError, match=rf"\({reason}\); see `wandb login`"):
        _open(tmp_path, wandb="online")


def test_responses_are_shown_without_their_middles_and_their_escape_sequences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rogue, safe = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e", r"\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    long = "<think>\n2 + 2\n</think>\n" + "so it is " * 60 + "[4]"
    shown = ("What is 2 + 2?", "4", long), (f"a{rogue}", f"c{rogue}", f"b\r{rogue}")
    problems = [Problem(id="p", text=problem, answer=gold) for problem, gold, _ in shown]
    rollouts = [rollout_of(text, (2,) * 312) for *_, text in shown]
    verdicts = [Verdict(outcome=Outcome.CORRECT)] * 2
    for sample in zip(problems, rollouts, verdicts, strict=True):
        say(describe_sample(*sample))
    problem, response, *last = capsys.readouterr().out.splitlines()
    assert problem == "  for example: What is 2 + 2?"
    assert response.startswith("  -> <think> 2 + 2 </think> so it is") and len(response) < 320
    assert response.endswith("so it is [4] (312 tokens, correct, gold 4)")
    about = f"(312 tokens, correct, gold c{safe})"
    assert last == [f"  for example: a{safe}", f"  -> b {safe} {about}"]


def test_a_gold_answer_of_several_lines_is_shown_on_one() -> None:
    verdict, rollout = Verdict(outcome=Outcome.WRONG), rollout_of("5", (2,))
    for gold, said in (("Add.\n\nIt is 4.", "Add. It is 4."), ("4 " * 99, "4 4  [...]  4 4")):
        shown = describe_sample(Problem(id="p", text="2+2?", answer=gold), rollout, verdict)
        assert len(shown.splitlines()) == 2 and len(shown) < 200
        assert said in shown.split("gold ")[1]


def test_an_evaluation_of_several_sets_has_a_console_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = _open(tmp_path)
    line = {"eval_correct_tokens_tenth": 52, "eval_correct_tokens_half": 108, "eval_seconds": 1.0}
    for key, *values in (("eval", 0.5, 80.0, 0.05, 8), ("eval_aime", 0.25, 9.5, 0.1, 30)):
        names = ("accuracy", "mean_response_tokens", "truncated_share", "samples")
        line |= {f"{key}_{n}": value for n, value in zip(names, values, strict=True)}
    for step in (4, 8):
        log.write_evaluation({"step": step, **line}, ["aime"])
    assert capsys.readouterr().out.splitlines()[:2] == [
        "held-out after step 4: accuracy 50.0 %, 80.0 tokens, 5.0 % cut off (8 samples); "
        "correct answers: p10 52, median 108 tokens",
        "aime after step 4: accuracy 25.0 %, 9.5 tokens, 10.0 % cut off (30 samples)",
    ]


def _config(*keys: str) -> Config:
    return load_config(None, ["model.path=m", "data.train=d", "eval.data=e", *keys])


LENGTHS = {"eval_correct_tokens_tenth": 90, "eval_correct_tokens_half": 120}
NEEDED = "p10 90, median 120 tokens; raise rollout.max_response_tokens above 64"
KEPT = "keep rollout.max_response_tokens=120 and raise data.prompts"


@pytest.mark.parametrize(
    ("counts", "limit", "solved", "words"),
    [
        ({"num_unfinished": 30, "num_wrong": 2}, 64, (0.5, 0.0), NEEDED),
        ({"num_unfinished": 30}, 120, (0.5, 0.0), KEPT),
        ({"num_unfinished": 30}, 64, (0.03, 0.5), NEEDED),  # what is cut off may be correct
        ({"num_unfinished": 30}, 64, (0.03, 0.16), NEEDED + "; the base model solves only 3 %"),
        ({"num_unfinished": 30}, 64, None, "raise rollout.max_response_tokens above 64; "),
        ({"num_unfinished": 30}, 64, None, "eval.holdout or eval.data"),
        # The remedy is that of the most common reason.
        ({"num_unfinished": 15, "num_wrong": 17}, 64, None, "does the answer field hold"),
        ({"num_unfinished": 15, "num_no_answer": 17}, 64, None, "chat template"),
        ({"num_unfinished": 15, "verify_timeouts": 17}, 64, None, "raise verify.timeout_seconds"),
        ({"num_unfinished": 15, "verify_errors": 17}, 64, None, "the judge fails"),
        # However many are cut off, a judge that gave no verdict at all comes first.
        ({"num_unfinished": 27, "verify_errors": 5}, 64, None, "the judge fails"),
        ({"num_unfinished": 27, "verify_errors": 4, "num_wrong": 1}, 64, None, "raise rollout.max"),
        ({"num_unfinished": 27, "verify_timeouts": 5}, 64, None, "raise verify.timeout_seconds"),
    ],
)
def test_a_step_without_any_is_explained_by_counts_and_the_first_evaluation(
    counts: dict[str, int], limit: int, solved: tuple[float, float] | None, words: str
) -> None:
    base: dict[str, float] = {}
    if solved is not None:
        base = LENGTHS | dict(zip(("eval_accuracy", "eval_truncated_share"), solved, strict=True))
    step = {"step": 1, "num_accepted": 0, "num_rollouts": 32, "num_wrong": 0}
    config = _config(f"rollout.max_response_tokens={limit}")
    said = explain_empty_step(step | counts, config, base, step | counts)
    # A method may have a limit of its own, below the run's.
    pruned = step | counts | {"length_limit": 9}
    pruned = explain_empty_step(pruned, config, base, pruned)
    assert ("method.limits" in pruned) == ("max_response_tokens" in said)
    begin = "step 1 accepted none of 32 responses, so nothing was learned: "
    assert said.startswith(f"{begin}{counts['num_unfinished']} cut off") and words in said
    assert ", 0 " not in said and ("model solves" in said) == ("model solves" in words)


@pytest.mark.parametrize(
    ("errors", "warns"), [({}, True), ({"eval_verify_errors": 6}, False), ({"errors": 6}, True)]
)
def test_a_base_model_whose_answers_nobody_could_judge_is_not_called_weak(
    errors: dict[str, int], warns: bool
) -> None:
    base = {"eval_accuracy": 0.0, "eval_truncated_share": 0.1, "eval_samples": 8}
    assert bool(advise_on_base(base | errors)) == warns


@pytest.mark.parametrize(
    ("seconds", "in_all", "workers", "warns"),
    [
        (6.1, 6.6, 2, True),
        (0.9, 1.0, 2, False),
        (3.0, 7.0, 2, False),
        (6.1, 6.6, 3, False),  # the six finished responses have a worker each
    ],
)
def test_a_judge_that_takes_most_of_a_step_is_told_with_its_workers(
    seconds: float, in_all: float, workers: int, warns: bool
) -> None:
    step = {"step": 1, "verify_seconds": seconds, "step_seconds": in_all}
    step |= {"num_rollouts": 8, "num_unfinished": 2}
    said = explain_slow_judge(step, workers, 2)
    wanted = "step 1: the judge took 6.1 of 6.6 s with 2 workers a rank; "
    assert said.startswith(wanted) if warns else said == ""


def few(accepted: int, **counts: int) -> dict[str, int]:
    """A step of 32 responses, of which the others are cut off."""
    given = {"step": 1, "num_rollouts": 32, "num_accepted": accepted}
    return given | {"num_unfinished": 32 - accepted} | counts


@pytest.mark.parametrize(
    ("steps", "warns"),
    [
        ([few(1)] * 10, True),  # 10 of 320
        ([few(1)] * 9, False),
        ([few(0)] * 5 + [few(3)] * 5, True),  # 15 of 320
        ([few(1)] * 4 + [few(2)] * 6, False),  # 16 of 320: one in twenty
        ([few(0)] * 10, False),  # that nothing is learned is said already
        ([{"step": 1, "num_rollouts": 32}] * 10, False),  # fixed data
    ],
)
def test_few_accepted_responses_in_ten_steps_are_said_with_the_remedy(
    steps: list[dict[str, int]], warns: bool
) -> None:
    base = LENGTHS | {"eval_accuracy": 0.9, "eval_truncated_share": 0.0}
    config = _config("rollout.max_response_tokens=64")
    said = explain_few_accepted(steps, config, base, steps[0])
    assert bool(said) == warns
    if not said:
        return
    accepted = sum(step["num_accepted"] for step in steps)
    begin = f"the last 10 steps accepted {accepted} of 320 responses, so little is learned: "
    assert said.startswith(begin + f"{320 - accepted} cut off; ")
    assert "rollout.max_response_tokens" in said
    # A method may have a limit of its own, below the run's.
    shorter = [{**step, "length_limit": 9} for step in steps]
    pruned = explain_few_accepted(shorter, config, base, shorter[0])
    assert "method.limits" in pruned


def test_a_step_whose_responses_are_alike_or_have_no_advantage_is_explained() -> None:
    alike = {"step": 3, "num_accepted": 32, "num_rollouts": 32, "zero_advantage_groups": 4}
    said = explain_empty_step(alike, _config(), {}, alike)
    assert "step 3 trained on no token" in said and "raise rollout.group_size" in said
    alike = {"step": 3, "num_rollouts": 32, "zero_advantage_groups": 32}
    said = explain_empty_step(alike, _config(), {}, alike)
    assert "none of its rows of data.responses has an advantage" in said


@pytest.mark.parametrize(
    ("room", "trained", "says"),
    [
        (70, 0, "32 responses, so nothing was learned: .* (70 tokens); raise train.max_tokens_per"),
        (4096, 9, "32 responses: .* the model's 512 positions; lower rollout.max_response_tokens"),
    ],
)
def test_responses_that_a_teacher_cannot_read_name_the_key(
    room: int, trained: int, says: str
) -> None:
    step = {"step": 1, "num_pairs_left_out": 7, "num_rollouts": 32, "trained_tokens": trained}
    said = explain_left_out(step, room=room, positions=512)
    assert re.search(re.escape(f"left out 7 of {says}").replace(r"\.\*", ".*"), said)


def _evaluation(step: int, accuracy: float, tokens: float, samples: int) -> dict[str, float]:
    line = {"eval_accuracy": accuracy, "eval_mean_response_tokens": tokens}
    return {"step": step, **line, "eval_samples": samples}


BEST = "the best evaluation is after step 2, 50.0 %, 40.0 tokens "
LOWER = "; most likely lower optimizer.lr=0.1"


@pytest.mark.parametrize(
    ("accuracies", "samples", "overrides", "says"),
    [
        ([0.5, 0.5, 0.0], 16, [], BEST + "(eval.export_best keeps it)" + LOWER),
        ([0.5, 0.5, 0.0], 16, ["eval.export_best=true"], BEST + "(its model is in best/)" + LOWER),
        ([0.5, 0.1, 0.0], 16, [], "no later evaluation was as accurate as the base model" + LOWER),
        ([0.5, 0.5, 0.0], 16, ["rollout.temperature=0.6"], "set rollout.temperature=0.6 to 1"),
        # Chance explains 3 of 12, or 5 points of 300; not 10 points of 300.
        ([0.5, 0.5, 0.25], 12, [], None),
        ([0.5, 0.5, 0.45], 300, [], None),
        ([0.5, 0.5, 0.4], 300, [], "fell from 50.0 % to 40.0 %, more than chance; "),
        ([0.5, 0.7, 0.6], 300, [], None),
        ([0.5], 300, [], None),
    ],
)
def test_a_run_that_ends_worse_than_it_began_says_so(
    accuracies: list[float], samples: int, overrides: list[str], says: str | None
) -> None:
    words = ["model.path=m", "data.train=d", "eval.data=e", "optimizer.lr=0.1", *overrides]
    lines = [
        _evaluation(2 * number, accuracy, 60 - 20 * number, samples)
        for number, accuracy in enumerate(accuracies)
    ]
    said = warn_of_decline(lines, load_config(None, words))
    assert (says or "") in said and bool(said) == (says is not None)


TRAINED = "training did this"


@pytest.mark.parametrize(
    ("first", "counts", "keys", "says"),
    [
        ((25, {}), {}, [], "step 1 accepted 25 of 128, so " + TRAINED),
        ((25, {}), {}, [], ": most likely lower optimizer.lr=0.1"),
        ((25, {}), {}, ["rollout.temperature=0.6"], "likely set rollout.temperature=0.6 to 1"),
        # Whatever is wrong with the responses, but not with their judge.
        ((25, {}), {"num_unfinished": 0, "num_no_answer": 128}, [], TRAINED),
        ((25, {}), {"num_unfinished": 0, "verify_errors": 128}, [], "the judge fails"),
        # Of 32 problems 17 of 128 may be chance, though not if each response were a problem.
        ((18, {}), {}, [], TRAINED),
        ((17, {}), {}, [], "raise rollout.max_response_tokens above 64"),
        ((0, {}), {}, [], "raise rollout.max_response_tokens above 64"),
        # The method's limit was higher.
        ((25, {"length_limit": 64}), {"length_limit": 9}, [], "raise method.limits above 9"),
        # Two problems a step: these may be harder than those.
        ((5, {"num_rollouts": 8}), {"num_rollouts": 8}, [], "raise rollout.max_response_tokens"),
    ],
)
def test_a_step_that_accepts_less_than_the_first_one_blames_training(
    first: tuple[int, dict[str, int]], counts: dict[str, int], keys: list[str], says: str
) -> None:
    config = _config(
        "rollout.max_response_tokens=64", "rollout.group_size=4", "optimizer.lr=0.1", *keys
    )
    base = LENGTHS | {"eval_accuracy": 0.99, "eval_truncated_share": 0.0}
    begin = {"step": 1, "num_rollouts": 128, "num_accepted": first[0]} | first[1]
    step = {"step": 2, "num_rollouts": 128, "num_accepted": 0, "num_unfinished": 128} | counts
    said = explain_empty_step(step, config, base, begin)
    assert says in said
    assert (TRAINED in said) == ("optimizer.lr" in said or "rollout.temperature" in said)
    assert (TRAINED in said) != ("raise" in said or "judge" in said)


def test_ten_steps_that_accept_less_than_the_first_one_blame_training() -> None:
    config = _config("rollout.max_response_tokens=64", "optimizer.lr=0.1", "rollout.group_size=4")
    steps = [{"step": 20, "num_rollouts": 128, "num_accepted": 2, "num_unfinished": 126}] * 10
    first = {"step": 1, "num_rollouts": 128, "num_accepted": 60}
    said = explain_few_accepted(steps, config, {}, first)
    assert said.startswith("the last 10 steps accepted 20 of 1280 responses, so little is learned")
    assert said.endswith(
        "; step 1 accepted 60 of 128, so training did this: most likely lower optimizer.lr=0.1"
    )
    said = explain_few_accepted(steps, config, {}, first | {"num_accepted": 3})
    assert "raise rollout.max_response_tokens above 64" in said and TRAINED not in said


@pytest.mark.parametrize(
    ("before", "now", "samples", "says"),
    [
        (0.0, 1.0, 128, "100.0 % of the responses were cut off, and of the base model's 0.0 %"),
        (0.0, 1.0, 128, ": training did this; most likely lower optimizer.lr=0.1"),
        (0.3, 0.9, 128, ": training did this; most likely lower optimizer.lr=0.1"),
        (0.3, 0.33, 128, "lower than the model's; raise eval.max_response_tokens"),
        (0.06, 0.06, 128, "lower than the model's; raise eval.max_response_tokens"),
        (0.0, 0.25, 4, "lower than the model's; raise eval.max_response_tokens"),  # chance
        (0.0, 0.05, 9999, ""),
        (0.3, 0.05, 128, ""),
    ],
)
def test_a_limit_that_cuts_off_more_than_of_the_base_model_blames_training(
    before: float, now: float, samples: int, says: str
) -> None:
    base, line = ({"eval_x_truncated_share": share} for share in (before, now))
    counted = {"eval_x_samples": samples}
    said = explain_cut_off(base | counted, line | counted, "eval_x", _config("optimizer.lr=0.1"))
    assert says in said and bool(said) == bool(says)
    assert ("raise" in said) != ("optimizer.lr" in said) or not said
    # A run of an early version has not counted what was cut off before.
    unknown = explain_cut_off({}, line | counted, "eval_x", _config())
    assert ("raise" in unknown) == (now > 0.05)


@pytest.mark.parametrize(
    ("skipped", "accuracies", "best", "worse", "levels"),
    [
        (0, [0.5, 0.5], True, 0, "II"),
        (1, [0.5, 0.5], True, 0, "WII"),  # a step that was skipped hides nothing
        (3, [0.5, 0.0], True, 0, "WIIW"),
        (0, [0.5, 0.0], True, 0, "IIW"),
        (1, [], False, 0, "WI"),
        (1, [0.5, 0.0], True, 1, "WWIIW"),
    ],
)
def test_the_last_lines_of_a_run_do_not_hide_each_other(
    skipped: int, accuracies: list[float], best: bool, worse: int, levels: str
) -> None:
    config = _config("run.dir=r", "run.steps=4", "optimizer.lr=0.1")
    summary = {"steps": 4, "skipped_steps": skipped, "model_step": 4, "worse_in_a_row": worse}
    if best:
        summary["best"] = {"step": 2, "mean_response_tokens": 9.0, "accuracy": 0.5}
    lines = [_evaluation(4 * n, accuracy, 60, 300) for n, accuracy in enumerate(accuracies)]
    said = [*closing_lines(summary, lines, config)]
    assert "".join(logging.getLevelName(level)[0] for level, _ in said) == levels
    texts = [text for _, text in said]
    model = texts.index("the model is in r/hf; `megatron-opsft report r` compares")
    assert (f"{skipped} of 4 steps trained on no token and learned nothing" in texts) == (
        skipped > 0
    )
    if best:
        assert texts[model + 1].startswith("best evaluation: after step 2, 9.0 tokens")
    assert texts[-1].startswith("THE MODEL GOT WORSE") == levels.endswith("W")


def test_a_run_without_a_step_names_no_model() -> None:
    summary = {"steps": 0, "skipped_steps": 0, "model_step": 0}
    assert [*closing_lines(summary, [_evaluation(0, 0.5, 60, 300)], _config())] == []


def test_a_step_on_fixed_data_has_no_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = _open(tmp_path)
    judged = ("accuracy", "num_accepted")
    log.write_step({key: value for key, value in _step_metrics(1).items() if key not in judged})
    said = capsys.readouterr().out
    assert said.startswith("step 1/3  loss 0.3000  tokens 33.3  grad norm 0.333  lr 1.00e-07")


@pytest.mark.parametrize(
    ("eval_every", "left"),
    # Two steps, and the last evaluation; that after the first step and after the second, too.
    [(0, 2 * 0.5 + 60), (2, 2 * 0.5 + 2 * 60), (1, 2 * 0.5 + 3 * 60)],
)
def test_the_time_left_has_the_evaluations_that_are_to_come(
    tmp_path: Path, eval_every: int, left: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a resumed run also before it has made one."""
    log = _open(tmp_path, eval_every=eval_every)
    log.write_step(_step_metrics(1))
    assert "about 1 s left" in capsys.readouterr().out  # nothing is evaluated
    values = {"accuracy": 0.5, "mean_response_tokens": 9.0, "truncated_share": 0.0, "samples": 4}
    values["seconds"] = 60.0
    log.write_evaluation({"step": 0} | {f"eval_{k}": v for k, v in values.items()})
    log.write_step(_step_metrics(1))
    assert f"about {left:.0f} s left" in capsys.readouterr().out
    run = RunConfig(dir=tmp_path, steps=3, eval_every=eval_every, tensorboard=False)
    MetricsLog(run, first_step=0, eval_seconds=60.0).write_step(_step_metrics(1))
    assert f"about {left:.0f} s left" in capsys.readouterr().out


def test_the_time_left_counts_checkpoints_and_leaves_out_the_step_that_warms_up() -> None:
    left = TimeLeft(first_step=2, last_step=10, eval_every=0, checkpoint_every=2)
    lines = [(3, 9.0, 0.0), (4, 1.0, 0.0), (5, 3.0, 0.5), (6, 2.0, 0.0), (7, 2.0, 1.5)]
    said = []
    for step, seconds, saving in lines:
        line = {"step": step, "step_seconds": seconds, "checkpoint_seconds": saving}
        said.append(left.after(line))
    # Checkpoints of 4, 6, 8 and 10 are to come; from step 5 on 4 has taken half a second, from
    # step 7 on 4 and 6 a second each.
    assert said == [7 * 9, 6 * 1, 5 * 2 + 3 * 0.5, 4 * 2 + 3 * 0.5, 3 * 2 + 2 * 1.0]


def test_the_time_left_is_by_the_newest_eight_steps() -> None:
    left = TimeLeft(first_step=0, last_step=20, eval_every=0, checkpoint_every=0)
    for step in range(1, 13):
        line = {"step": step, "step_seconds": 5.0 if step < 5 else 1.0}
        seconds = left.after(line)
    assert seconds == 8 * 1.0


def test_lengths_of_correct_answers_and_a_base_model_that_solves_little_are_said() -> None:
    assert [*measure_correct(range(1, 101)).items()] == [*zip(LENGTHS, (10, 50), strict=True)]
    assert set(measure_correct([7]).values()) == {7} and measure_correct([]) == {}
    assert advise_on_base({"eval_accuracy": 0.2, "eval_truncated_share": 0.0}) == ""
    said = advise_on_base({"eval_accuracy": 0.025, "eval_truncated_share": 0.0})
    assert "solves only 2.5 % of the held-out" in said


SECTIONS = re.split(r"^## ", (ROOT / "docs/results.md").read_text(), flags=re.MULTILINE)[1:]


def documented(section: str) -> set[str]:
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}


# Of vLLM: vllm/test_speculative.py. Of self-distillation: gloo/test_methods_run.py.
ELSEWHERE = {"spec_acceptance", "spec_tokens_per_draft", "num_pairs_left_out"}


def test_every_key_is_documented(cli: ForkedCli, tmp_path: Path) -> None:
    """Of a run that has every kind of key."""
    keys = ["method.name=grpo", "method.beta=0.1", "method.updates_per_batch=2", "run.steps=1"]
    keys += ["eval.max_response_tokens=64", "train.offload=gradients", "verify.judge=math"]
    ended = cli.run(["train", QUICKSTART, *SMALL_RUN, *keys, f"run.dir={tmp_path}"])
    assert ended.exit_code == 0, ended.stderr
    written = [(tmp_path / name).read_bytes() for name in ("metrics.jsonl", "evals.jsonl")]
    written.append(gzip.decompress((tmp_path / "rollouts/step_000001.jsonl.gz").read_bytes()))
    of_step, of_meter, of_evaluation, of_response = map(documented, SECTIONS)
    documented_keys = (
        (of_step | of_meter) - ELSEWHERE,
        of_evaluation | {f"eval_{key}" for key in of_meter},
        of_response,
    )
    for keys_of_line, lines in zip(documented_keys, written, strict=True):
        assert keys_of_line == set(json.loads(lines.splitlines()[0]))


@pytest.mark.parametrize(
    ("accuracies", "worse"),
    [
        ([], 0),
        ([0.5], 0),
        ([0.5, 0.4], 1),
        ([0.5, 0.4, 0.45, 0.3, 0.2], 2),  # chance explains 45 %
        ([0.5, 0.4, 0.3, 0.5], 0),
    ],
)
def test_evaluations_that_are_worse_than_the_base_model_s_count_in_a_row(
    accuracies: list[float], worse: int
) -> None:
    lines = [_evaluation(step, accuracy, 10, 300) for step, accuracy in enumerate(accuracies)]
    assert worse_in_a_row(lines) == worse


def test_a_run_that_gives_up_says_which_model_it_hands_out() -> None:
    words = ["model.path=m", "data.train=d", "run.steps=9", "eval.stop_when_worse=2"]
    for model_step, says in ((4, "hf/ holds the best model, of step 4"), (7, "no better model")):
        said = describe_early_end(3, 7, model_step, load_config(None, words))
        assert said.startswith("ended after step 7 of 9, with 3 evaluations in a row less accurate")
        assert "(eval.stop_when_worse=2)" in said and says in said
