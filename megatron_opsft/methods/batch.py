"""The global batch of a step: accepted samples of all ranks in one order, and what there is to say
of it.
"""

from collections.abc import Sequence

from megatron_opsft.records import FinishReason, Outcome, Problem, Rollout, Sample, Verdict

THINK, THINK_END = "<think>", "</think>"


def in_problem_order(samples: Sequence[Sample], problems: Sequence[Problem]) -> list[Sample]:
    """Sorted by the step's problem order and sample index, so that the number of ranks cannot
    matter.
    """
    position = {problem.id: number for number, problem in enumerate(problems)}
    return sorted(samples, key=lambda sample: (position[sample.problem_id], sample.sample_index))


def describe_rollouts(
    pairs: Sequence[tuple[Rollout, Verdict]], samples: Sequence[Sample], *, prompts_open_think: bool
) -> dict[str, float | int]:
    """Metrics of a step's responses of all ranks: counts, shares in [0, 1], lengths in tokens.

    num_unclosed_think: finished responses whose thinking, begun by the prompt (prompts_open_think)
    or by themselves, never ends; the verifier reads them whole and may accept them.
    """
    lengths = [len(rollout.response_ids) for rollout, _ in pairs]
    outcomes = [verdict.outcome for _, verdict in pairs]
    num_rollouts = len(pairs)
    return {
        "num_rollouts": num_rollouts,
        "num_accepted": len(samples),
        "accept_rate": len(samples) / num_rollouts,
        "accuracy": outcomes.count(Outcome.CORRECT) / num_rollouts,
        "truncated_share": outcomes.count(Outcome.UNFINISHED) / num_rollouts,
        "verify_timeouts": outcomes.count(Outcome.TIMEOUT),
        "num_unclosed_think": sum(
            rollout.finish_reason is FinishReason.STOP
            and THINK_END not in rollout.text
            and (prompts_open_think or THINK in rollout.text)
            for rollout, _ in pairs
        ),
        "verify_errors": outcomes.count(Outcome.ERROR),
        "mean_response_tokens": sum(lengths) / num_rollouts,
        "mean_accepted_tokens": (
            sum(len(s.response_ids) for s in samples) / len(samples) if samples else 0.0
        ),
        "max_accepted_tokens": max((len(s.response_ids) for s in samples), default=0),
    }
