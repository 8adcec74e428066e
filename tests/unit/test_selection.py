"""Which responses count as accepted, and the metrics of a step."""

import pytest
from responses import facts

from megatron_opsft.methods.facts import describe_rollouts, has_unclosed_think, select
from megatron_opsft.records import FinishReason, Outcome, Rollout


def test_what_is_correct_finished_and_no_longer_than_the_limit_is_accepted() -> None:
    for outcome in Outcome:
        assert bool(select([facts(outcome=outcome)], 10)) == (outcome is Outcome.CORRECT)
    assert select([facts(finished=False)], 10) == []
    responses = [facts(num_tokens=n, num_prompt_tokens=50) for n in (9, 10, 11)]
    assert select(responses, 10) == responses[:2]


@pytest.mark.parametrize(
    ("text", "finish", "by_prompt", "by_itself"),
    [
        ("so </think> 1", FinishReason.STOP, False, False),
        ("so 1", FinishReason.STOP, True, False),
        ("<think> so 1", FinishReason.STOP, True, True),
        ("<think> so </think> 1", FinishReason.STOP, False, False),
        ("<think> so", FinishReason.LENGTH, False, False),
    ],
)
def test_finished_responses_that_never_end_their_thinking_are_seen(
    text: str, finish: FinishReason, by_prompt: bool, by_itself: bool
) -> None:
    """Whether the prompt or the response itself begins it."""
    rollout = Rollout(
        problem_id="a",
        prompt_ids=(7,),
        response_ids=(0,),
        text=text,
        finish_reason=finish,
        weight_version=0,
    )
    assert has_unclosed_think(rollout, prompts_open_think=True) == by_prompt
    assert has_unclosed_think(rollout, prompts_open_think=False) == by_itself


def test_metrics_of_a_step() -> None:
    outcomes = (Outcome.CORRECT, Outcome.CORRECT, Outcome.TIMEOUT, Outcome.UNFINISHED)
    responses = [
        facts(num_tokens=length, outcome=outcome, unclosed_think=length == 4)
        for length, outcome in zip((2, 4, 6, 8), outcomes, strict=True)
    ]
    assert describe_rollouts(responses, 3) == {
        **{"num_rollouts": 4, "num_accepted": 1, "accept_rate": 0.25, "accuracy": 0.5},
        **{"truncated_share": 0.25, "num_unfinished": 1, "num_wrong": 0, "num_no_answer": 0},
        **{"verify_timeouts": 1, "verify_errors": 0, "num_unclosed_think": 1},
        **{"mean_response_tokens": 5.0, "mean_accepted_tokens": 2.0, "max_accepted_tokens": 2},
    }
