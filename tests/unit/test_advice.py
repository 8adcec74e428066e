"""What a run says of steps that accept little: the reason in counts, and the remedy."""

import json
from pathlib import Path

import pytest

from megatron_opsft.run.advice import AcceptanceNotes, advise_on_base, measure_correct

LENGTHS = {"eval_correct_tokens_tenth": 90, "eval_correct_tokens_half": 120}
SOLVES = {"eval_accuracy": 0.5, "eval_truncated_share": 0.0}


def step_of(**counts: int) -> dict[str, int]:
    return {"step": 1, "num_accepted": 0, "num_rollouts": 32} | counts


def test_lengths_within_which_a_tenth_and_a_half_end() -> None:
    assert list(measure_correct(range(1, 101)).items()) == [
        ("eval_correct_tokens_tenth", 10),
        ("eval_correct_tokens_half", 50),
    ]
    assert set(measure_correct([7]).values()) == {7} and measure_correct([]) == {}


NEEDED = (
    "step 1 accepted none of 32 responses, so nothing was learned: 30 cut off, 2 wrong; ",
    "p10 90, median 120 tokens; raise rollout.max_response_tokens=64",
)


@pytest.mark.parametrize(
    ("limit", "base", "parts"),
    [
        (64, LENGTHS | SOLVES, NEEDED),
        (120, LENGTHS | SOLVES, ["keep rollout.max_response_tokens=120 and raise data.prompts"]),
        (
            64,
            LENGTHS | {"eval_accuracy": 0.03, "eval_truncated_share": 0.16},
            [*NEEDED, "; the base model solves only 3 % of the held-out problems"],
        ),
        (
            64,  # among which may be correct ones
            LENGTHS | {"eval_accuracy": 0.03, "eval_truncated_share": 0.5},
            [*NEEDED, "; the base model's accuracy is not known: 50 % of its"],
        ),
        (64, {}, ["raise rollout.max_response_tokens=64; ", "set eval.holdout or eval.data"]),
    ],
)
def test_the_first_step_without_any_is_explained_by_the_first_evaluation(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    limit: int,
    base: dict[str, float],
    parts: list[str],
) -> None:
    if base:
        (tmp_path / "evals.jsonl").write_text(json.dumps({"step": 0, **base}) + "\n")
    notes = AcceptanceNotes(tmp_path, limit=limit)
    for _ in range(2):
        notes.note(step_of(num_unfinished=30, num_wrong=2, num_no_answer=0))
    (said,) = caplog.messages
    assert all(part in said for part in parts), said
    solved = base.get("eval_accuracy", 1) >= 0.2
    assert solved == ("the base model solves" not in said and "is not known" not in said)


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("num_wrong", "does the answer field hold"),
        ("num_no_answer", "chat template"),
        ("verify_timeouts", "raise verify.timeout_seconds"),
        ("verify_errors", "the verifier fails"),
    ],
)
def test_the_remedy_is_that_of_the_commonest_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str, remedy: str
) -> None:
    AcceptanceNotes(tmp_path, limit=64).note(step_of(num_unfinished=15) | {reason: 17})
    assert remedy in caplog.text


def test_a_base_model_that_solves_little_is_said_at_once() -> None:
    assert advise_on_base({"eval_accuracy": 0.2, "eval_truncated_share": 0.0}) == ""
    said = advise_on_base({"eval_accuracy": 0.025, "eval_truncated_share": 0.0})
    assert "solves only 2.5 % of the held-out" in said and "data.template=chat" in said
