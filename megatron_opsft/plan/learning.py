"""What a job's method makes of a step's responses: which are trained on, in which updates; pure."""

from dataclasses import replace
from itertools import cycle, islice

from megatron_opsft.config import Config
from megatron_opsft.plan.lengths import Workload


def learned_by(config: Config, workload: Workload) -> Workload:
    """What the method trains on. workload: with the responses that on-policy SFT accepts.

    All of them, at most: without a divergence groups of equal rewards are left out. With fixed data
    none is sampled, and as many finished ones are trained on.
    """
    method = config.method
    if method.has_fixed_data:
        finished = [n for n in workload.lengths if n < workload.limit] or list(workload.lengths)
        read = tuple(islice(cycle(finished), len(workload.lengths)))
        return replace(workload, lengths=(), accepted=read)
    if method.learns_from_rejected:
        return replace(workload, accepted=workload.lengths)
    return workload


def updates_of(config: Config, workload: Workload) -> list[Workload]:
    """The trained responses of each optimizer step."""
    count = config.method.num_updates
    if count == 1:
        return [workload]
    shares = [workload.accepted[number::count] for number in range(count)]
    return [replace(workload, accepted=share) for share in shares if share]
