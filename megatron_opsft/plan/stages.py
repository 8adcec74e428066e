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
    pp, parallel = job.parallel.pp, job.parallel
    layers = job.shape.num_layers // pp
    of_layer = _count(job.shape, parallel, has_layer=True)
    state = 12 if job.dtype_bytes == 2 else 8
    stages = []
    for index in range(pp):
        first, last = index == 0, index == pp - 1
        of_ends = _count(job.shape, parallel, has_embedding=first, has_output=last)
        dense, experts, whole = (
            layers * one + ends for one, ends in zip(of_layer, of_ends, strict=True)
        )
        updated = -(-dense // job.num_copies) + -(-experts // job.num_expert_copies)
        stages.append(
            Stage(
                index=index,
                num_layers=layers,
                has_embedding=first,
                has_output=last,
                num_parameters=dense + experts,
                expert_parameters=experts,
                whole_parameters=whole,
                weight_bytes=(dense + experts) * job.dtype_bytes,
                gradient_bytes=(dense + experts) * 4,
                optimizer_bytes=state * updated,
            )
        )
    return stages


@cache
def _count(
    shape: ModelShape,
    parallel: ParallelConfig,
    *,
    has_layer: bool = False,
    has_embedding: bool = False,
    has_output: bool = False,
) -> tuple[int, int, int]:
    """Elements of these parts on one rank, but for experts of expert-parallel ranks; of those; of
    the Hugging Face model.
    """
    table = WeightTable(replace(shape, num_layers=1), tp_size=parallel.tp)
    dense = experts = whole = 0
    for rule in table.stage_rules(
        [0] if has_layer else [], has_embedding=has_embedding, has_output=has_output
    ):
        elements = prod(shard_shape(rule, parallel.expert_tp if rule.is_expert else parallel.tp))
        if rule.is_expert and parallel.ep > 1:
            experts += elements
        else:
            dense += elements
        whole += 0 if rule.replica else sum(prod(shape) for shape in rule.hf_shapes)
    return dense, experts // parallel.ep, whole
