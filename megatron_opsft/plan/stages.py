"""What the stages hold, counted from the weight table alone: for a search, which tries hundreds of
layouts. `ranks` builds Megatron's model instead and is exact about the padding of its buffers.
"""

from dataclasses import replace
from functools import cache
from math import prod

from megatron_opsft.architectures.shape import ModelShape
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.memory import Stage
from megatron_opsft.weights.rules import WeightTable
from megatron_opsft.weights.slicing import shard_shape


def count_stages(job: TrainingJob) -> list[Stage]:
    """Every pipeline stage; layers are cut evenly."""
    pp, vpp = job.parallel.pp, job.parallel.vpp or 1
    layers = job.shape.num_layers // pp
    stages = []
    for index in range(pp):
        first, last = index == 0, index == pp - 1
        ends = [name for name, there in (("first", first), ("last", last)) if there]
        numel, whole = (layers * n for n in _count(job.shape, job.parallel.tp, "layer"))
        for end in ends:
            here, originals = _count(job.shape, job.parallel.tp, end)
            if end == "last" and first and vpp == 1:  # a tied head is the embedding itself
                here, originals = _count(job.shape, job.parallel.tp, "last of one")
            numel, whole = numel + here, whole + originals
        state = 12 if job.dtype_bytes == 2 else 8
        stages.append(
            Stage(
                index=index,
                num_layers=layers,
                has_embedding=first,
                has_output=last,
                num_parameters=numel,
                whole_parameters=whole,
                weight_bytes=numel * job.dtype_bytes,
                gradient_bytes=numel * 4,
                optimizer_bytes=-(-numel // job.num_copies) * state,
            )
        )
    return stages


@cache
def _count(shape: ModelShape, tp: int, part: str) -> tuple[int, int]:
    """(elements on one rank, elements of the Hugging Face model) of a layer, of what only the first
    or the last stage has, or of what the last has where it is the first too.
    """
    table = WeightTable(replace(shape, num_layers=1), tp_size=tp)
    layer = table.stage_rules([0], has_embedding=False, has_output=False)
    rules = {
        "layer": layer,
        "first": table.stage_rules([], has_embedding=True, has_output=False),
        "last": table.stage_rules([], has_embedding=False, has_output=True),
        "last of one": [
            rule
            for rule in table.stage_rules([], has_embedding=True, has_output=True)
            if rule not in table.stage_rules([], has_embedding=True, has_output=False)
        ],
    }[part]
    here = sum(prod(shard_shape(rule, tp)) for rule in rules)
    whole = sum(prod(s) for rule in rules if not rule.replica for s in rule.hf_shapes)
    return here, whole
