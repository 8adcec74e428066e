"""Which responses are trained on: correct, finished, and no longer than L (Algorithm 1 of the
paper).
"""

from collections.abc import Sequence

from megatron_opsft.records import FinishReason, Outcome, Rollout, Sample, Verdict


def select(
    rollouts: Sequence[Rollout], verdicts: Sequence[Verdict], max_response_tokens: int
) -> list[Sample]:
    """The accepted responses, in order; |o| counts response tokens, end token included."""
    return [
        Sample(
            problem_id=rollout.problem_id,
            sample_index=rollout.sample_index,
            prompt_ids=rollout.prompt_ids,
            response_ids=rollout.response_ids,
        )
        for rollout, verdict in zip(rollouts, verdicts, strict=True)
        if verdict.outcome is Outcome.CORRECT
        and rollout.finish_reason is FinishReason.STOP
        and len(rollout.response_ids) <= max_response_tokens
    ]
