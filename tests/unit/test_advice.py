"""What a run says of steps that accept little: the reason in counts, and the remedy."""

import pytest

from megatron_opsft.run.advice import advise_on_base, explain_empty_step, measure_correct

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
        (64, LENGTHS | {"eval_accuracy": 0.03, "eval_truncated_share": 0.5}, NEEDED),
        (64, {}, ["raise rollout.max_response_tokens=64; ", "eval.holdout or eval.data"]),
    ],
)
def test_a_step_without_any_is_explained_by_the_first_evaluation(
    limit: int, base: dict[str, float], parts: list[str]
) -> None:
    counts = step_of(num_unfinished=30, num_wrong=2, num_no_answer=0)
    said = explain_empty_step(counts, limit, base)
    assert all(part in said for part in parts), said
    assert ("the base model solves" in said) == any("solves" in part for part in parts)


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
    assert remedy in explain_empty_step(step_of(num_unfinished=15) | {reason: 17}, 64, {})


def test_a_base_model_that_solves_little_is_said_at_once() -> None:
    assert advise_on_base({"eval_accuracy": 0.2, "eval_truncated_share": 0.0}) == ""
    said = advise_on_base({"eval_accuracy": 0.025, "eval_truncated_share": 0.0})
    assert "solves only 2.5 % of the held-out" in said
