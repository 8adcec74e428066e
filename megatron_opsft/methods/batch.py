"""The responses of a step, of all ranks: what there is to say of them."""

from collections.abc import Sequence

from megatron_opsft.records import FinishReason, Outcome, Response, Rollout

THINK, THINK_END = "<think>", "</think>"


def has_unclosed_think(rollout: Rollout, *, prompts_open_think: bool) -> bool:
    """Whether a finished response's thinking, begun by the prompt (prompts_open_think) or by
    itself, never ends; the verifier reads it whole and may accept it.
    """
    return (
        rollout.finish_reason is FinishReason.STOP
        and THINK_END not in rollout.text
        and (prompts_open_think or THINK in rollout.text)
    )


def select(responses: Sequence[Response], max_response_tokens: int) -> list[Response]:
    """Correct, finished, and no longer than the limit, in order (Algorithm 1 of the paper); end
    tokens count.
    """
    return [
        response
        for response in responses
        if response.correct and response.finished and response.num_tokens <= max_response_tokens
    ]


def describe_rollouts(
    responses: Sequence[Response], accepted: Sequence[Response]
) -> dict[str, float | int]:
    """Metrics of a step's responses of all ranks: counts, shares in [0, 1], lengths in tokens."""
    outcomes = [response.outcome for response in responses]
    accepted_lengths = [response.num_tokens for response in accepted]
    num_rollouts = len(responses)
    return {
        "num_rollouts": num_rollouts,
        "num_accepted": len(accepted),
        "accept_rate": len(accepted) / num_rollouts,
        "accuracy": outcomes.count(Outcome.CORRECT) / num_rollouts,
        "truncated_share": outcomes.count(Outcome.UNFINISHED) / num_rollouts,
        "num_unfinished": outcomes.count(Outcome.UNFINISHED),
        "num_wrong": outcomes.count(Outcome.WRONG),
        "num_no_answer": outcomes.count(Outcome.NO_ANSWER),
        "verify_timeouts": outcomes.count(Outcome.TIMEOUT),
        "num_unclosed_think": sum(response.unclosed_think for response in responses),
        "verify_errors": outcomes.count(Outcome.ERROR),
        "mean_response_tokens": sum(r.num_tokens for r in responses) / num_rollouts,
        "mean_accepted_tokens": sum(accepted_lengths) / len(accepted) if accepted else 0.0,
        "max_accepted_tokens": max(accepted_lengths, default=0),
    }
