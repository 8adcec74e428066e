"""What is planned: a run's configuration on so many devices."""

from dataclasses import dataclass

from megatron_opsft.architectures.config_from_hf import read_model_shape
from megatron_opsft.architectures.shape import ModelShape
from megatron_opsft.batching.zigzag import padded
from megatron_opsft.config import Config, ParallelConfig
from megatron_opsft.loss.loss_memory import CrossEntropy, choose_cross_entropy
from megatron_opsft.plan.hardware import Hardware
from megatron_opsft.rollout.limits import (
    EngineTraits,
    engine_traits,
    fit_lengths,
    max_engine_tokens,
)
from megatron_opsft.storage.model_paths import resolve_config
from megatron_opsft.weights.slicing import padded_vocab_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """One run on `world_size` training ranks, one for each device.

    On a GPU the version set of the project is assumed: TransformerEngine, vLLM, no Apex.
    """

    config: Config
    shape: ModelShape
    hardware: Hardware
    world_size: int

    @property
    def parallel(self) -> ParallelConfig:
        return self.config.parallel

    @property
    def dp(self) -> int:
        return self.world_size // self.parallel.replica_size

    @property
    def num_copies(self) -> int:
        """Ranks that hold the same shards, and share gradients and optimizer among them."""
        return self.dp * self.parallel.cp

    @property
    def num_expert_copies(self) -> int:
        """Ranks that hold the same experts, and share their gradients and optimizer among them."""
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
        return padded_vocab_size(self.shape.vocab_size, self.parallel.tp) // self.parallel.tp

    @property
    def microbatch_tokens(self) -> int:
        """A rank's, in the largest micro-batch: a sequence longer than the budget gets one of its
        own.
        """
        align = self.parallel.tp if self.parallel.sequence_parallel else 1
        whole = padded(self.longest_tokens, self.parallel.cp, align)
        return max(self.config.train.max_tokens_per_microbatch, whole // self.parallel.cp)

    @property
    def longest_tokens(self) -> int:
        """Of the longest prompt and response that are trained on."""
        return self.config.data.max_prompt_tokens + self.config.rollout.max_response_tokens

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest prompt and response together that an engine is asked for."""
        return max_engine_tokens(self.config)

    @property
    def cross_entropy(self) -> CrossEntropy:
        """As the trainer will choose. Errors: `UserError`."""
        problem = "" if self.with_te else "TransformerEngine needs CUDA and bfloat16"
        return choose_cross_entropy(
            self.config.train.cross_entropy,
            problem,
            max_tokens=self.config.train.max_tokens_per_microbatch,
            rows_per_rank=self.rows_per_rank,
        )

    @property
    def num_responses(self) -> int:
        """B x G of one step."""
        return self.config.data.prompts_per_step * self.config.rollout.group_size

    @property
    def keeps_reference(self) -> bool:
        """Whether there is a reference model."""
        return self.config.method.objective(1.0).needs_reference

    @property
    def scores_before(self) -> bool:
        """Whether the policy that sampled is scored before the first update."""
        method = self.config.method
        several = method.num_updates > 1 or method.objective(1.0).reward_beta > 0
        return several and not method.has_fixed_data

    @property
    def engine_tp(self) -> int:
        """Ranks of one rollout engine."""
        return self.config.rollout.tp

    @property
    def engine(self) -> EngineTraits:
        """What its rollout engine can do."""
        return engine_traits(self.config.rollout.engine)

    @property
    def num_engines(self) -> int:
        return self.world_size // self.engine_tp

    @property
    def ranks_per_node(self) -> int:
        return min(self.world_size, self.hardware.gpus_per_node)

    @property
    def host_bytes_per_node(self) -> float:
        """CPU memory that the ranks of a node share."""
        return self.hardware.host_memory_bytes * self.ranks_per_node


def make_job(config: Config, hardware: Hardware, world_size: int) -> TrainingJob:
    """Of the model config.json is read: a directory's, the shipped one, or the hub's; lengths that
    nobody says are set to what the model has room for. Errors: `UserError`.
    """
    shape = read_model_shape(resolve_config(config.model.path))
    config = fit_lengths(config, shape.max_position_embeddings)
    return TrainingJob(config=config, shape=shape, hardware=hardware, world_size=world_size)
