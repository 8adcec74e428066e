"""What the ranks of a pipeline stage hold, counted from the weight table: weights, gradients and
optimizer without the padding of Megatron's buffers, which is less than 0.01 % of them; pure.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import prod

from megatron_opsft.architectures.shape import ModelShape
from megatron_opsft.config import ParallelConfig
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.weights.rules import WeightTable
from megatron_opsft.weights.slicing import shard_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The model of all ranks of one pipeline stage: tensor-parallel and data-parallel peers hold
    as much.

    num_parameters: elements on one rank, vocabulary padding and copies included; expert_parameters:
    of them those of the experts that expert parallelism shares out, 0 without; whole_parameters:
    of the Hugging Face model, those that this stage has the originals of. The bytes are of one
    rank, the optimizer's of the data-parallel rank that has most.
    """

    index: int
    num_layers: int
    has_embedding: bool
    has_output: bool
    num_parameters: int
    expert_parameters: int
    whole_parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def resident_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


def count_stages(job: TrainingJob) -> list[Stage]:
    """Every pipeline stage; layers are cut evenly."""
    pp, vpp = job.parallel.pp, job.parallel.vpp or 1
    layers = job.shape.num_layers // pp
    stages = []
    for index in range(pp):
        first, last = index == 0, index == pp - 1
        ends = [name for name, there in (("first", first), ("last", last)) if there]
        counts = [_count(job.shape, job.parallel, "layer")] * layers
        for end in ends:
            # A tied head is the embedding itself where that is there.
            is_one = end == "last" and first and vpp == 1
            counts.append(_count(job.shape, job.parallel, "last of one" if is_one else end))
        dense, experts, whole = (sum(parts) for parts in zip(*counts, strict=True))
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
def _count(shape: ModelShape, parallel: ParallelConfig, part: str) -> tuple[int, int, int]:
    """Elements on one rank, but for experts of expert-parallel ranks; of those; of the
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
    dense = experts = whole = 0
    for rule in rules:
        elements = prod(shard_shape(rule, parallel.expert_tp if rule.is_expert else parallel.tp))
        if rule.is_expert and parallel.ep > 1:
            experts += elements
        else:
            dense += elements
        whole += 0 if rule.replica else sum(prod(shape) for shape in rule.hf_shapes)
    return dense, experts // parallel.ep, whole
