"""What drafts bring to decoding; pure."""

from collections.abc import Callable

from megatron_opsft.plan.job import TrainingJob


def pass_tokens(acceptance: float, num_drafted: int) -> float:
    """Tokens that a forward pass gives of a response: one, and those of its draft up to the first
    wrong one, each right with the chance `acceptance` if those before it are.
    """
    return sum(acceptance**n for n in range(num_drafted + 1))


def fastest_pass(
    job: TrainingJob, acceptance: float, seconds: Callable[[int], float]
) -> tuple[float, float]:
    """(seconds of a token of every response, tokens that a pass gives of each).

    seconds: of a pass, by the draft tokens of every response. The index of suffixes chooses how
    many pay, none included; a draft model always drafts as many.
    """
    rollout = job.config.rollout
    lengths = [0]
    if rollout.draft_model is not None:
        lengths = [rollout.draft_tokens]
    elif rollout.speculation != "off" and acceptance > 0:
        lengths = list(range(job.engine.max_draft + 1))
    return min(
        (seconds(length) / pass_tokens(acceptance, length), pass_tokens(acceptance, length))
        for length in lengths
    )
