"""Facts of responses, as the ranks tell each other."""

from megatron_opsft.records import Outcome, Response

_CORRECT = Response(
    problem_index=0,
    sample_index=0,
    num_prompt_tokens=2,
    num_tokens=5,
    outcome=Outcome.CORRECT,
    finished=True,
    unclosed_think=False,
    rank=0,
    rollout_index=0,
)


def facts(**changes: object) -> Response:
    """Of a correct, finished response of five tokens, but for `changes`."""
    return _CORRECT._replace(**changes)
