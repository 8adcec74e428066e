"""Which responses are trained on: correct, finished, and no longer than L (Algorithm 1 of the
paper).
"""

from collections.abc import Sequence

from megatron_opsft.records import Outcome, ResponseFacts


def select(responses: Sequence[ResponseFacts], max_response_tokens: int) -> list[ResponseFacts]:
    """The accepted responses, in order; |o| counts response tokens, end token included."""
    return [
        response
        for response in responses
        if response.outcome is Outcome.CORRECT
        and response.finished
        and response.num_response_tokens <= max_response_tokens
    ]
