"""What the stages hold, counted from the weight table alone: for a search, which tries hundreds of
layouts. `ranks` builds Megatron's model instead and is exact about the padding of its buffers.
"""

from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import numpy as np

from megatron_opsft.architectures.shape import ModelShape
from megatron_opsft.config import ParallelConfig
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
        counts = [layers * _count(job.shape, job.parallel, "layer")]
        for end in ends:
            # A tied head is the embedding itself where that is there.
            is_one = end == "last" and first and vpp == 1
            counts.append(_count(job.shape, job.parallel, "last of one" if is_one else end))
        dense, experts, whole = (int(n) for n in sum(counts))
        numel = dense + experts
        state = 12 if job.dtype_bytes == 2 else 8
        stages.append(
            Stage(
                index=index,
                num_layers=layers,
                has_embedding=first,
                has_output=last,
                num_parameters=numel,
                expert_parameters=experts,
                whole_parameters=whole,
                weight_bytes=numel * job.dtype_bytes,
                gradient_bytes=numel * 4,
                optimizer_bytes=state
                * (-(-dense // job.num_copies) + -(-experts // job.num_expert_copies)),
            )
        )
    return stages


@cache
def _count(shape: ModelShape, parallel: ParallelConfig, part: str) -> Any:
    """int64 [3]: elements on one rank, but for experts of expert-parallel ranks; of those; of the
    Hugging Face model. Of a layer, of what only the first or the last stage has, or of what the
    last has where it is the first too.
    """
    table = WeightTable(replace(shape, num_layers=1), tp_size=parallel.tp)
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
    counts = np.zeros(3, dtype=np.int64)
    for rule in rules:
        tp = parallel.expert_tp if rule.is_expert else parallel.tp
        shared_out = rule.is_expert and parallel.ep > 1
        counts[int(shared_out)] += prod(shard_shape(rule, tp))
        counts[2] += 0 if rule.replica else sum(prod(shape) for shape in rule.hf_shapes)
    counts[1] //= parallel.ep
    return counts
