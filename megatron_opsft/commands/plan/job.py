"""What is planned: a run's configuration on a number of devices, and what its ranks hold; pure."""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any

from megatron_opsft.commands.plan.assumptions import Hardware, Workload, make_workload
from megatron_opsft.config import Config, ParallelConfig
from megatron_opsft.config.training import check_world
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.storage.model_paths import resolve_config
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.models.weights.slicing import padded_vocab_size, shard_shape
from megatron_opsft.models.weights.vllm_layout import check_rollout_tp
from megatron_opsft.rollout.limits import (
    EngineTraits,
    check_engine_ranks,
    check_engine_settings,
    check_lengths,
    engine_traits,
    fit_lengths,
)
from megatron_opsft.trainer.batching.microbatch import padded
from megatron_opsft.trainer.loss.loss_memory import CrossEntropy, choose_cross_entropy
from megatron_opsft.trainer.model.checks import check_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What each rank of one pipeline stage holds.

    num_parameters: elements, vocabulary padding and copies included; expert_parameters: of them
    those of the experts that expert parallelism shares out; updated_parameters: of them those that
    the data-parallel rank with most updates; whole_parameters: of the Hugging Face model, those
    that this stage has the originals of. Bytes: without the padding of Megatron's buffers, which is
    less than 0.01 % of them.
    """

    index: int
    num_layers: int
    has_output: bool
    num_parameters: int
    expert_parameters: int
    updated_parameters: int
    whole_parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run on `world_size` training ranks, one for each device, and the responses of a step.

    On a GPU the version set of the project is assumed: TransformerEngine, vLLM, no Apex.
    """

    config: Config
    shape: ModelShape
    hardware: Hardware
    world_size: int
    workload: Workload = Workload()

    @property
    def parallel(self) -> ParallelConfig:
        return self.config.parallel

    @property
    def dp(self) -> int:
        return self.world_size // self.parallel.replica_size

    @property
    def num_copies(self) -> int:
        """Ranks that hold the same shards, and share out their gradients and optimizer."""
        return self.dp * self.parallel.cp

    @property
    def num_expert_copies(self) -> int:
        """As above, for the ranks that hold the same experts."""
        parallel = self.parallel
        return self.world_size // (parallel.expert_tp * parallel.ep * parallel.pp)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element of weights and activations."""
        return 4 if self.config.model.dtype == "float32" else 2

    @property
    def with_te(self) -> bool:
        """Whether layers are TransformerEngine's, as `uses_transformer_engine` decides."""
        return self.hardware.is_cuda and self.dtype_bytes == 2

    @property
    def sequence_parallel(self) -> bool:
        return self.parallel.sequence_parallel and self.parallel.tp > 1

    @property
    def rows_per_rank(self) -> int:
        """Rows of the output layer, padding included."""
        return (
            padded_vocab_size(self.shape.vocab_size, self.parallel.tp)
            // self.parallel.tp
        )

    @property
    def longest_tokens(self) -> int:
        """Of the longest prompt and response that are trained on."""
        return (
            self.config.data.max_prompt_tokens + self.config.rollout.max_response_tokens
        )

    @property
    def microbatch_tokens(self) -> int:
        """A rank's, in the largest micro-batch: the budget, or one sequence that is longer."""
        align = self.parallel.tp if self.parallel.sequence_parallel else 1
        whole = padded(self.longest_tokens, self.parallel.cp, align)
        return max(
            self.config.train.max_tokens_per_microbatch, whole // self.parallel.cp
        )

    @property
    def cross_entropy(self) -> CrossEntropy:
        """As the trainer will choose. Errors: `UserError`."""
        problem = "" if self.with_te else "TransformerEngine needs CUDA and bfloat16"
        return choose_cross_entropy(
            self.config.train.cross_entropy,
            problem,
            max_tokens=self.config.train.max_tokens_per_microbatch,
            rows_per_rank=self.rows_per_rank,
            with_teacher=self.has_teacher,
        )

    @property
    def has_teacher(self) -> bool:
        """Whether the loss compares with a teacher's logits."""
        return self.config.method.objective(1.0).has_teacher

    @property
    def num_responses(self) -> int:
        """B x G of one step."""
        return self.config.data.prompts_per_step * self.config.rollout.group_size

    @property
    def engine(self) -> EngineTraits:
        """What its rollout engine can do."""
        return engine_traits(self.config.rollout.engine)

    @property
    def num_engines(self) -> int:
        return self.world_size // self.config.rollout.tp

    @property
    def ranks_per_node(self) -> int:
        return min(self.world_size, self.hardware.gpus_per_node)

    @property
    def num_parameters(self) -> int:
        """Of the whole model, as Hugging Face has it."""
        return sum(stage.whole_parameters for stage in self.stages)

    @cached_property
    def stages(self) -> list[Stage]:
        """Every pipeline stage, counted from the weight table; layers are cut evenly."""
        parallel = self.parallel
        layers = self.shape.num_layers // parallel.pp
        of_layer = _count(self.shape, parallel, num_layers=1, first=False, last=False)
        state = (
            12 if self.dtype_bytes == 2 else 8
        )  # a main weight where it is another, two moments
        stages = []
        for index in range(parallel.pp):
            first, last = index == 0, index == parallel.pp - 1
            of_ends = _count(self.shape, parallel, num_layers=0, first=first, last=last)
            dense, experts, whole = (
                layers * one + ends for one, ends in zip(of_layer, of_ends, strict=True)
            )
            updated = -(-dense // self.num_copies) + -(
                -experts // self.num_expert_copies
            )
            stages.append(
                Stage(
                    index=index,
                    num_layers=layers,
                    has_output=last,
                    num_parameters=dense + experts,
                    expert_parameters=experts,
                    updated_parameters=updated,
                    whole_parameters=whole,
                    weight_bytes=(dense + experts) * self.dtype_bytes,
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
    num_layers: int,
    first: bool,
    last: bool,
) -> tuple[int, int, int]:
    """Elements of one layer or none, and of the model's first and last parts: (on one rank,
    without experts that are shared out; of such experts; of the Hugging Face model).
    """
    table = WeightTable(replace(shape, num_layers=1), tp_size=parallel.tp)
    dense = experts = whole = 0
    for rule in table.stage_rules(
        range(num_layers), has_embedding=first, has_output=last
    ):
        elements = prod(
            shard_shape(rule, parallel.expert_tp if rule.is_expert else parallel.tp)
        )
        if rule.is_expert and parallel.ep > 1:
            experts += elements
        else:
            dense += elements
        whole += 0 if rule.replica else sum(prod(shape) for shape in rule.hf_shapes)
    return dense, experts // parallel.ep, whole


def make_job(
    config: Config, hardware: Hardware, world_size: int, **responses: Any
) -> Job:
    """Of the model config.json is read; lengths that nobody says are set to what the model has room
    for. responses: as of `make_workload`. Errors: `UserError`.
    """
    shape = read_model_shape(resolve_config(config.model.path))
    config = fit_lengths(config, shape.max_position_embeddings)
    return Job(
        config=config,
        shape=shape,
        hardware=hardware,
        world_size=world_size,
        workload=make_workload(config, **responses),
    )


def check_job(job: Job) -> None:
    """Errors: `UserError` for everything that can be wrong before a device is there, as the trainer
    would raise it, and for a device that config or engine cannot use.
    """
    config, shape, hardware, rollout = (
        job.config,
        job.shape,
        job.hardware,
        job.config.rollout,
    )
    if config.run.device == ("cpu" if hardware.is_cuda else "cuda"):
        raise UserError(
            f"run.device={config.run.device}: give another --gpu than {hardware.name}"
        )
    check_engine_settings(
        rollout.engine, rollout.tp, rollout.speculative, seeded=rollout.seeded
    )
    check_world(job.world_size, config.parallel)
    check_layout(shape, config.parallel)
    check_lengths(config, shape.max_position_embeddings)
    _ = job.cross_entropy
    check_rollout_tp(shape, rollout.tp)
    if shape.moe and not hardware.is_cuda and rollout.engine == "vllm":
        raise UserError("rollout.engine=vllm: on a CPU use hf for a mixture of experts")
    check_engine_ranks(rollout.tp, job.world_size)
