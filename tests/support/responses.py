"""Facts of responses, as the ranks tell each other; and rollouts."""

from typing import Any

from megatron_opsft.records import FinishReason, Outcome, Response, Rollout

_CORRECT = Response(
    problem_index=0,
    sample_index=0,
    num_prompt_tokens=2,
    num_tokens=5,
    outcome=Outcome.CORRECT,
    finished=True,
    rank=0,
    rollout_index=0,
)


def facts(**changes: object) -> Response:
    """Of a correct, finished response of five tokens, but for `changes`."""
    return _CORRECT._replace(**changes)


def rollout_of(text: str, response_ids: tuple[int, ...] = (3, 4, 5), **changes: Any) -> Rollout:
    given = {"problem_id": "p", "prompt_ids": (0,), "finish_reason": FinishReason.STOP} | changes
    return Rollout(text=text, response_ids=response_ids, **{"weight_version": 7, **given})
