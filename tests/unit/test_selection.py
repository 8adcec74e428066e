"""Which responses count as accepted, and the metrics of a step."""

from dataclasses import replace

import pytest
from responses import facts

from megatron_opsft.methods.facts import describe_rollouts, has_unclosed_think, select
from megatron_opsft.records import FinishReason, Outcome, Rollout

ROLLOUT = Rollout(
    problem_id="a",
    sample_index=0,
    prompt_ids=(7, 8),
    response_ids=(0, 1),
    text="",
    finish_reason=FinishReason.STOP,
    weight_version=0,
)


def test_what_is_correct_finished_and_no_longer_than_the_limit_is_accepted() -> None:
    for outcome in Outcome:
        assert bool(select([facts(outcome=outcome)], 10)) == (outcome is Outcome.CORRECT)
    assert select([facts(finished=False)], 10) == []
    responses = [facts(num_tokens=n, num_prompt_tokens=50) for n in (9, 10, 11)]
    assert select(responses, 10) == responses[:2]


@pytest.mark.parametrize(("opened", "expected"), [(True, 2), (False, 1)])
def test_finished_responses_that_never_end_their_thinking_are_seen(
    opened: bool, expected: int
) -> None:
    """Those that hit the limit are not; opened: by the prompt."""
    texts = ["so </think> 1", "so 1", "<think> so 1", "<think> so </think> 1"]
    rollouts = [replace(ROLLOUT, text=text) for text in texts]
    rollouts.append(replace(ROLLOUT, text="<think> so", finish_reason=FinishReason.LENGTH))
    seen = [has_unclosed_think(rollout, prompts_open_think=opened) for rollout in rollouts]
    assert sum(seen) == expected


def test_metrics_of_a_step() -> None:
    lengths = (2, 4, 6, 8)
    outcomes = (Outcome.CORRECT, Outcome.CORRECT, Outcome.TIMEOUT, Outcome.UNFINISHED)
    responses = [
        facts(
            num_tokens=length,
            outcome=outcome,
            finished=outcome is not Outcome.UNFINISHED,
            unclosed_think=length == 4,
        )
        for length, outcome in zip(lengths, outcomes, strict=True)
    ]
    metrics = describe_rollouts(responses, select(responses, 3))
    assert metrics["num_rollouts"] == 4
    assert metrics["num_accepted"] == 1
    assert metrics["accept_rate"] == 0.25
    assert metrics["accuracy"] == 0.5
    assert metrics["truncated_share"] == 0.25
    assert metrics["verify_timeouts"] == 1
    assert [metrics[f"num_{name}"] for name in ("unfinished", "wrong", "no_answer")] == [1, 0, 0]
    assert metrics["num_unclosed_think"] == 1
    assert metrics["mean_response_tokens"] == 5.0
    assert metrics["max_accepted_tokens"] == 2
