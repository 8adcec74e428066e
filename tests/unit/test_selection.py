"""Which responses count as accepted, and the metrics of a step."""

import pytest
from responses import facts

from megatron_opsft.methods.facts import describe_rollouts, describe_token_use, select
from megatron_opsft.records import Outcome, Thinking, TokenUse


def test_what_is_correct_finished_and_no_longer_than_the_limit_is_accepted() -> None:
    for outcome in Outcome:
        assert bool(select([facts(outcome=outcome)], 10)) == (outcome is Outcome.CORRECT)
    assert select([facts(finished=False)], 10) == []
    responses = [facts(num_tokens=n, num_prompt_tokens=50) for n in (9, 10, 11)]
    assert select(responses, 10) == responses[:2]


def test_metrics_of_a_step() -> None:
    outcomes = (Outcome.CORRECT, Outcome.CORRECT, Outcome.TIMEOUT, Outcome.UNFINISHED)
    responses = [
        facts(num_tokens=length, outcome=outcome)
        for length, outcome in zip((2, 4, 6, 8), outcomes, strict=True)
    ]
    assert describe_rollouts(responses, 3) == {
        **{"num_rollouts": 4, "num_accepted": 1, "accept_rate": 0.25, "accuracy": 0.5},
        **{"truncated_share": 0.25, "num_unfinished": 1, "num_wrong": 0, "num_no_answer": 0},
        **{"verify_timeouts": 1, "verify_errors": 0, "num_unclosed_think": 0},
        **{"mean_response_tokens": 5.0, "mean_accepted_tokens": 2.0, "max_accepted_tokens": 2},
    }


def test_metrics_of_the_meter_are_of_finished_responses() -> None:
    """Two of four state the right answer: after 2 of 8 tokens, and after 6 of 12."""
    uses = (
        TokenUse(Thinking.CLOSED, 6, 2, 3, 1, 0.5, 0),
        TokenUse(Thinking.MALFORMED, 4, 6, 1, 3, 0.0, 2),
        TokenUse(Thinking.EMPTY, 2),
        TokenUse(Thinking.OPEN, 100),
    )
    lengths = (8, 12, 4, 100)
    responses = [
        facts(num_tokens=length, token_use=use, finished=length < 100)
        for length, use in zip(lengths, uses, strict=True)
    ]
    assert describe_token_use(responses) == {
        **{"mean_thinking_tokens": 4.0, "mean_answer_tokens": 4.0, "mean_doubts": 4 / 3},
        **{"repeated_share": pytest.approx(0.5 / 3), "mean_leaked_tokens": 2 / 3},
        **{"num_empty_think": 1, "num_malformed_think": 1, "num_stating_right": 2},
        **{"mean_tokens_to_right": 4.0, "after_right_share": 1 - 8 / 20, "mean_restated": 2.0},
    }
    assert not any(response.unclosed_think for response in responses)
    assert facts(token_use=TokenUse(Thinking.OPEN, 5)).unclosed_think


def test_what_no_response_has_is_left_out_of_the_meter() -> None:
    assert describe_token_use([facts(), facts(finished=False, token_use=TokenUse())]) == {}
    metrics = describe_token_use([facts(token_use=TokenUse())])
    assert metrics["mean_answer_tokens"] == 5 and "mean_tokens_to_right" not in metrics
