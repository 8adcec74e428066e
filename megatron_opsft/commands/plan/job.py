"""The run that is planned: its configuration on a number of devices, and what its ranks hold.

Pure: no device, no Megatron.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod

from megatron_opsft.commands.plan.assumptions import (
    PAPER_ACCEPTANCE,
    Hardware,
    Workload,
    make_workload,
)
from megatron_opsft.config import Config, LoraConfig, ParallelConfig
from megatron_opsft.config.training import (
    OffloadLevel,
    RolloutConfig,
    TrainConfig,
    gives_up,
)
from megatron_opsft.errors import UserError
from megatron_opsft.methods.settings import MethodSettings
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.architectures.sharding import stage_layers
from megatron_opsft.models.storage.model_paths import resolve_config
from megatron_opsft.models.weights.lora import adapters_of_rules
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.models.weights.slicing import padded_vocab_size, shard_shape
from megatron_opsft.records import record
from megatron_opsft.rollout.limits import EngineTraits, engine_traits
from megatron_opsft.run.start.checked_run import fit_lengths, make_checked_run
from megatron_opsft.run.start.disk import num_parameters, num_trained
from megatron_opsft.runtime.rounding import ceil_div
from megatron_opsft.section import Section
from megatron_opsft.trainer.batching.padding import padded
from megatron_opsft.trainer.loss.loss_memory import CrossEntropy, choose_cross_entropy


@record
class Stage:
    """The share of the model that each rank of one pipeline stage holds.

    Bytes do not count the padding of Megatron's buffers, which is less than 0.01 % of them.
    """

    index: int
    layers: ModelShape
    """The model, of the stage's layers alone."""
    has_output: bool
    """True for the last stage, which has the output layer and the loss."""
    num_parameters: int
    """Elements on a rank, padding of the vocabulary, replicated weights and adapters included."""
    trained_parameters: int
    """Elements of `num_parameters` that are trained: with LoRA those of the adapters, else all."""
    trained_expert_parameters: int
    """Elements of `trained_parameters` in experts that expert parallelism distributes."""
    updated_parameters: int
    """Elements that the optimizer of one rank updates, on the rank with the most."""
    weight_bytes: int
    trained_bytes: int
    """Bytes of the trained weights, part of `weight_bytes`."""
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def adapter_share(self) -> float:
        """Elements of adapters for each frozen element of the stage; 0 without LoRA."""
        frozen = self.num_parameters - self.trained_parameters
        return self.trained_parameters / frozen if frozen else 0.0


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run on `world_size` training ranks, one per device, and the responses of a step.

    On a GPU the project's own versions are assumed: TransformerEngine, vLLM, no Apex.
    """

    config: Config
    shape: ModelShape
    hardware: Hardware
    world_size: int
    workload: Workload = Workload()

    def with_offload(self, level: OffloadLevel) -> "PlannedRun":
        """Return the run with another `train.offload`."""
        return self.with_sections(
            train=self.train.model_copy(update={"offload": level})
        )

    def with_sections(self, **sections: Section) -> "PlannedRun":
        """Return the run with other sections of its configuration."""
        return replace(self, config=self.config.model_copy(update=sections))

    def gives_up(self, level: OffloadLevel) -> bool:
        """True if the trainer gives up what `level` adds while the engine samples."""
        return gives_up(self.train.offload_level, level)

    @property
    def parallel(self) -> ParallelConfig:
        return self.config.parallel

    @property
    def rollout(self) -> RolloutConfig:
        return self.config.rollout

    @property
    def train(self) -> TrainConfig:
        return self.config.train

    @property
    def method(self) -> MethodSettings:
        return self.config.method

    @property
    def dp(self) -> int:
        return self.world_size // self.parallel.replica_size

    @property
    def num_copies(self) -> int:
        """Number of ranks that hold the same shards and divide their gradients and optimizer."""
        return self.dp * self.parallel.cp

    @property
    def num_expert_copies(self) -> int:
        """Number of ranks that hold the same experts and divide their gradients and optimizer."""
        return self.world_size // self.parallel.expert_ranks

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element of weights and activations."""
        return 4 if self.config.model.dtype == "float32" else 2

    @property
    def with_te(self) -> bool:
        """True if layers are TransformerEngine's, as `uses_transformer_engine` decides."""
        return self.hardware.is_cuda and self.dtype_bytes == 2

    @property
    def hidden_per_rank(self) -> float:
        """Elements of a token's hidden states on one rank."""
        return self.shape.hidden_size / self.parallel.sequence_shards

    @property
    def rows_per_rank(self) -> int:
        """Rows of the output layer on a rank, padding included."""
        tp = self.parallel.tp
        return padded_vocab_size(self.shape.vocab_size, tp) // tp

    @property
    def largest_weight_bytes(self) -> float:
        """Bytes of the largest weight of a layer on a rank: gate and up of a feed-forward part, or
        what a gated delta net projects hidden states with.
        """
        num_rows = 2 * self.shape.shard_ffn[1] / self.parallel.expert_tp
        if self.shape.delta:
            projected = self.shape.delta.projected_size / self.parallel.tp
            num_rows = max(num_rows, projected)
        return num_rows * self.shape.hidden_size * self.dtype_bytes

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest prompt and response that are trained on."""
        return self.config.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of the largest micro-batch on a rank: the budget, or one sequence above it."""
        cp = self.parallel.cp
        longest = padded(self.longest_tokens, cp, self.parallel.sequence_shards) // cp
        return max(self.train.max_tokens_per_microbatch, longest)

    @property
    def cross_entropy(self) -> CrossEntropy:
        """The kernel that the trainer will choose. Errors: `UserError`."""
        problem = "" if self.with_te else "TransformerEngine needs CUDA and bfloat16"
        return choose_cross_entropy(
            self.train.cross_entropy,
            problem,
            max_tokens=self.train.max_tokens_per_microbatch,
            rows_per_rank=self.rows_per_rank,
            with_teacher=self.has_teacher,
        )

    @property
    def has_teacher(self) -> bool:
        """True if the loss compares the model's logits with a teacher's."""
        return self.method.objective(1.0).has_teacher

    @property
    def engine(self) -> EngineTraits:
        """Abilities of the rollout engine."""
        return engine_traits(self.rollout.engine)

    @property
    def num_engines(self) -> int:
        return self.world_size // self.rollout.tp

    @property
    def ranks_per_node(self) -> int:
        return min(self.world_size, self.hardware.gpus_per_node)

    @property
    def num_parameters(self) -> int:
        """Elements of the whole Hugging Face model."""
        return num_parameters(self.shape)

    @property
    def num_trained(self) -> int:
        """Elements that are trained: with LoRA those of the adapters, else all."""
        return num_trained(self.config, self.shape)

    @cached_property
    def stages(self) -> list[Stage]:
        """Every pipeline stage, counted from the weight table; layers are divided evenly."""
        pp = self.parallel.pp
        # Two float32 moments, and a float32 main weight where weights are bfloat16.
        state_bytes = 12 if self.dtype_bytes == 2 else 8
        stages = []
        for index in range(pp):
            first, last = index == 0, index == pp - 1
            layers = self.shape.with_layers(
                stage_layers(self.shape.num_layers, self.parallel, index)
            )
            dense, experts = _count(layers, self.parallel, first=first, last=last)
            num_elements = dense + experts
            lora = self.config.lora
            if lora.rank:
                dense, experts = _count(
                    layers, self.parallel, first=first, last=last, lora=lora
                )
                num_elements += dense + experts
            updated = ceil_div(dense, self.num_copies)
            updated += ceil_div(experts, self.num_expert_copies)
            stages.append(
                Stage(
                    index=index,
                    layers=layers,
                    has_output=last,
                    num_parameters=num_elements,
                    trained_parameters=dense + experts,
                    trained_expert_parameters=experts,
                    updated_parameters=updated,
                    weight_bytes=num_elements * self.dtype_bytes,
                    trained_bytes=(dense + experts) * self.dtype_bytes,
                    gradient_bytes=(dense + experts) * 4,
                    optimizer_bytes=state_bytes * updated,
                )
            )
        return stages


@cache
def _count(
    layers: ModelShape,
    parallel: ParallelConfig,
    *,
    first: bool,
    last: bool,
    lora: LoraConfig | None = None,
) -> tuple[int, int]:
    """Count the elements of weights, or with `lora` those of adapters, on one rank of the first,
    the last or another stage, which has these layers.

    Elements in experts that expert parallelism distributes are counted apart, as the second number.
    """
    kinds = [layers.kind_of(layer) for layer in range(layers.num_layers)]
    counts = Counter(kinds)
    # One layer of each kind stands for all.
    few = layers.with_layers([kinds.index(kind) for kind in counts])
    table = WeightTable(few, tp_size=parallel.tp)
    ends = table.stage_rules(range(0), has_embedding=first, has_output=last)
    parts = [(ends, 1)]
    for number, count in enumerate(counts.values()):
        of_layer = range(number, number + 1)
        rules = table.stage_rules(of_layer, has_embedding=False, has_output=False)
        parts.append((rules, count))
    dense = experts = 0
    for rules, count in parts:
        if lora is not None:
            rules = adapters_of_rules(rules, lora)
        for rule in rules:
            tp = parallel.expert_tp if rule.is_expert else parallel.tp
            num_elements = count * prod(shard_shape(rule, tp))
            if rule.is_expert and parallel.ep > 1:
                experts += num_elements
            else:
                dense += num_elements
    return dense, experts // parallel.ep


def make_planned_run(
    config: Config,
    hardware: Hardware,
    world_size: int,
    *,
    mean_tokens: float | None = None,
    acceptance: float = PAPER_ACCEPTANCE,
) -> PlannedRun:
    """Describe a run; of the model only config.json is read.

    Lengths that the user did not set become as long as the model allows. mean_tokens, acceptance:
    see `make_workload`. Errors: `UserError`.
    """
    shape = read_model_shape(resolve_config(config.model.path))
    config = fit_lengths(config, shape.max_position_embeddings)
    return PlannedRun(
        config=config,
        shape=shape,
        hardware=hardware,
        world_size=world_size,
        workload=make_workload(config, mean_tokens=mean_tokens, acceptance=acceptance),
    )


def check_planned_run(run: PlannedRun) -> None:
    """Check everything that can be checked without a device, as the trainer would.

    Errors: `UserError`, also for a device that the configuration or the engine cannot use.
    """
    config, shape, hardware = run.config, run.shape, run.hardware
    refused_device = "cpu" if hardware.is_cuda else "cuda"
    if config.run.device == refused_device:
        raise UserError(
            f"run.device={config.run.device}: give another --gpu than {hardware.name}"
        )
    make_checked_run(config, shape, run.world_size)
    _ = run.cross_entropy  # raises for a kernel that this run cannot have
    if shape.moe and not hardware.is_cuda and run.rollout.engine == "vllm":
        raise UserError("rollout.engine=vllm: on a CPU use hf for a mixture of experts")
