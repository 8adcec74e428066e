"""What a run says of steps that accept little: the reason in counts, and the remedy."""

import pytest

from megatron_opsft.run.advice import advise_on_base, explain_empty_step, measure_correct

LENGTHS = {"eval_correct_tokens_tenth": 90, "eval_correct_tokens_half": 120}
NEEDED = "p10 90, median 120 tokens; raise rollout.max_response_tokens=64"
KEPT = "keep rollout.max_response_tokens=120 and raise data.prompts"


def test_lengths_within_which_a_tenth_and_a_half_end() -> None:
    assert [*measure_correct(range(1, 101)).items()] == [*zip(LENGTHS, (10, 50), strict=True)]
    assert set(measure_correct([7]).values()) == {7} and measure_correct([]) == {}


@pytest.mark.parametrize(
    ("counts", "limit", "solved", "words"),
    [
        ({"num_unfinished": 30, "num_wrong": 2}, 64, (0.5, 0.0), NEEDED),
        ({"num_unfinished": 30}, 120, (0.5, 0.0), KEPT),
        ({"num_unfinished": 30}, 64, (0.03, 0.5), NEEDED),  # what is cut off may be correct
        ({"num_unfinished": 30}, 64, (0.03, 0.16), NEEDED + "; the base model solves only 3 %"),
        ({"num_unfinished": 30}, 64, None, "raise rollout.max_response_tokens=64; "),
        ({"num_unfinished": 30}, 64, None, "eval.holdout or eval.data"),
        # The remedy is that of the most common reason.
        ({"num_unfinished": 15, "num_wrong": 17}, 64, None, "does the answer field hold"),
        ({"num_unfinished": 15, "num_no_answer": 17}, 64, None, "chat template"),
        ({"num_unfinished": 15, "verify_timeouts": 17}, 64, None, "raise verify.timeout_seconds"),
        ({"num_unfinished": 15, "verify_errors": 17}, 64, None, "the verifier fails"),
    ],
)
def test_a_step_without_any_is_explained_by_counts_and_the_first_evaluation(
    counts: dict[str, int], limit: int, solved: tuple[float, float] | None, words: str
) -> None:
    base: dict[str, float] = {}
    if solved is not None:
        base = LENGTHS | dict(zip(("eval_accuracy", "eval_truncated_share"), solved, strict=True))
    step = {"step": 1, "num_accepted": 0, "num_rollouts": 32, "num_wrong": 0}
    said = explain_empty_step(step | counts, limit, base)
    begin = "step 1 accepted none of 32 responses, so nothing was learned: "
    assert said.startswith(f"{begin}{counts['num_unfinished']} cut off") and words in said
    assert ", 0 " not in said and ("model solves" in said) == ("model solves" in words)


def test_a_base_model_that_solves_little_is_said_at_once() -> None:
    assert advise_on_base({"eval_accuracy": 0.2, "eval_truncated_share": 0.0}) == ""
    said = advise_on_base({"eval_accuracy": 0.025, "eval_truncated_share": 0.0})
    assert "solves only 2.5 % of the held-out" in said
