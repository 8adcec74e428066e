"""What a run says of steps that accept little: the reason in counts, and the remedy."""

import json
from pathlib import Path

import pytest

from megatron_opsft.report.runs import describe_skipped
from megatron_opsft.run.advice import (
    AcceptanceNotes,
    advise_on_base,
    describe_correct,
    describe_rejected,
    explain_empty_step,
    measure_correct,
)


def step_of(**counts: int) -> dict[str, int]:
    return {"step": 1, "num_accepted": 0, "num_rollouts": 32} | counts


def correct(tenth: int, half: int) -> dict[str, int]:
    return {"eval_correct_tokens_tenth": tenth, "eval_correct_tokens_half": half}


SOLVES = {"eval_accuracy": 0.5, "eval_truncated_share": 0.0}


def test_reasons_are_counted_and_zeros_left_out() -> None:
    counts = step_of(num_unfinished=28, num_wrong=3, num_no_answer=0, verify_timeouts=1)
    assert describe_rejected(counts) == "28 cut off, 3 wrong, 1 timed out"
    assert describe_rejected(step_of()) == ""


def test_lengths_within_which_a_tenth_and_a_half_end() -> None:
    assert measure_correct(range(1, 101)) == correct(10, 50)
    assert measure_correct([7]) == correct(7, 7)
    assert measure_correct([]) == {}


def test_the_remedy_names_the_limit_that_would_have_accepted_some() -> None:
    counts = step_of(num_unfinished=30, num_wrong=2)
    said = explain_empty_step(counts, 64, {**correct(90, 120), **SOLVES})
    assert said.startswith("step 1 accepted none of 32 responses, so nothing was learned: 30 cut")
    assert "rollout.max_response_tokens=90 would have taken a tenth" in said
    assert "120 half of them" in said
    within = explain_empty_step(counts, 100, {**correct(90, 120), **SOLVES})
    assert "end within 90 tokens" in within and "rollout.max_response_tokens=120" in within
    base = {"eval_accuracy": 0.03, "eval_truncated_share": 0.16}
    hard = explain_empty_step(counts, 64, {**correct(90, 120), **base})
    assert hard == said + (
        "; the base model solves only 3 % of the held-out problems: easier ones, or a stronger "
        "model, come first"
    )
    base["eval_truncated_share"] = 0.5  # among which may be correct ones
    unknown = explain_empty_step(counts, 64, {**correct(90, 120), **base})
    assert unknown == said + (
        "; what the base model solves is not known: 50 % of its held-out responses were cut off; "
        "raise eval.max_response_tokens"
    )
    base["eval_accuracy"] = 0.5
    assert explain_empty_step(counts, 64, {**correct(90, 120), **base}) == said
    half = explain_empty_step(counts, 64, {**correct(13, 31), **SOLVES})
    assert half.endswith(
        "half of the base model's correct answers end within 31 tokens, which "
        "rollout.max_response_tokens=64 allows: more of data.prompts_per_step x "
        "rollout.group_size would find some"
    )


def test_the_remedy_without_lengths_is_an_evaluation_or_a_longer_one() -> None:
    counts = step_of(num_unfinished=30, num_wrong=2)
    never = explain_empty_step(counts, 64, {})
    assert "raise it, and evaluate, with eval.holdout or eval.data and a larger eval.max" in never
    before = explain_empty_step(counts, 64, {"eval_accuracy": 0.0, "eval_truncated_share": 1.0})
    assert "raise it, and raise eval.max_response_tokens further, to see" in before
    assert "eval.holdout" not in before and "eval.data" not in before


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("num_wrong", "does the answer field hold"),
        ("num_no_answer", "chat template"),
        ("verify_timeouts", "raise verify.timeout_seconds"),
        ("verify_errors", "the verifier fails"),
    ],
)
def test_the_remedy_is_that_of_the_commonest_reason(reason: str, remedy: str) -> None:
    counts = step_of(num_unfinished=15) | {reason: 17}
    assert remedy in explain_empty_step(counts, 64, {**correct(90, 120), **SOLVES})


def test_ten_steps_below_a_twentieth_are_said_once_in_ten_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = AcceptanceNotes(tmp_path, limit=64)
    said = []
    for _ in range(25):
        few.note(step_of(num_accepted=1, num_wrong=31))
        said.append(len(caplog.messages))
    assert (said.index(1), said.index(2), said[-1]) == (9, 19, 2)
    assert caplog.messages[0] == (
        "only 10 of 320 responses (3.1 %) were accepted in the last 10 steps; the last one: "
        "31 wrong"
    )
    enough = AcceptanceNotes(tmp_path, limit=64)
    for _ in range(25):
        enough.note(step_of(num_accepted=2))  # 6.25 %
    assert len(caplog.messages) == 2


def test_the_first_step_without_any_is_explained_by_the_first_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = {"step": 0, **SOLVES, **correct(90, 120)}
    (tmp_path / "evals.jsonl").write_text(json.dumps(line) + "\n")
    notes = AcceptanceNotes(tmp_path, limit=64)
    for _ in range(2):
        notes.note(step_of(num_unfinished=32))
    (said,) = caplog.messages
    assert "rollout.max_response_tokens=90 would have taken a tenth" in said


def test_what_was_learned_is_one_line() -> None:
    assert describe_skipped(0, 24) == ""
    assert describe_skipped(3, 24) == "3 of 24 steps accepted no response and learned nothing"
    assert describe_skipped(24, 24).startswith("NOTHING WAS LEARNED: none of 24 steps accepted")


def test_an_evaluation_says_how_long_correct_answers_are() -> None:
    lengths = {"eval_correct_tokens_tenth": 52, "eval_correct_tokens_half": 108}
    assert describe_correct({"step": 0, **lengths}) == (
        "; of the correct ones a tenth end within 52 tokens, half within 108"
    )
    assert describe_correct({"step": 0, "eval_accuracy": 0.0}) == ""


def test_a_base_model_that_solves_little_is_said_at_once() -> None:
    assert advise_on_base({"eval_accuracy": 0.2, "eval_truncated_share": 0.0}) == ""
    assert advise_on_base({"eval_accuracy": 0.025, "eval_truncated_share": 0.0}) == (
        "the base model solves only 2.5 % of the held-out problems: easier ones, or a stronger "
        "model, come first; a small instruct model may need data.template=chat"
    )
