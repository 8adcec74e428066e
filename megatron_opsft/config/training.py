"""Sections of a run: its model, engine and sampling, update, and parallelism."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    model_validator,
)

from megatron_opsft.errors import UserError
from megatron_opsft.section import (
    ADJUSTABLE,
    BY_CONTENT,
    FREE,
    CommaSeparated,
    Expanded,
    Section,
)

OffloadLevel = Literal["none", "gradients", "optimizer", "all"]
OFFLOAD_LEVELS: tuple[OffloadLevel, ...] = ("none", "gradients", "optimizer", "all")
"""Values of `train.offload`; each gives up what the one before it does, and more."""


def gives_up(level: OffloadLevel, what: OffloadLevel) -> bool:
    """True if a trainer with `train.offload=level` gives up what the value `what` adds."""
    return OFFLOAD_LEVELS.index(level) >= OFFLOAD_LEVELS.index(what)


class ModelConfig(Section):
    path: Annotated[str, Expanded, BY_CONTENT]
    """A Hugging Face directory or hub name, a run, a checkpoint, or `tiny_reasoner`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of weights and activations; main weights are float32."""
    adapter: Annotated[str | None, Expanded, BY_CONTENT] = None
    """A LoRA adapter that the run starts from, a directory of PEFT's (docs/lora.md)."""
    load: Annotated[Literal["auto", "disk", "engine"], FREE] = "auto"
    """disk: every rank reads its shards from the files. engine: vLLM reads the files and fills the
    shards. auto: engine where possible.
    """


LoraTarget = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
]


class LoraConfig(Section):
    rank: int = Field(0, ge=0)
    """Rank r of the adapters A [r, in] and B [out, r]; 0: all weights are trained."""
    alpha: PositiveFloat = 32.0
    """A linear layer computes W x + (alpha / r) B A x."""
    targets: Annotated[tuple[LoraTarget, ...], CommaSeparated] = Field(
        get_args(LoraTarget), min_length=1
    )
    """The linear layers that get adapters, those of experts too."""
    dropout: float = 0.0
    """Always 0: the trained policy must be the one that was sampled."""

    @property
    def scale(self) -> float:
        """alpha / r, with which B A is multiplied."""
        return self.alpha / self.rank

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Errors: `UserError` for any dropout, a target named twice, and settings of adapters that
        are not there.
        """
        if len(set(self.targets)) < len(self.targets):
            raise UserError(
                f"lora.targets={','.join(self.targets)} names a layer twice"
            )
        fields = type(self).model_fields
        changed = [
            key
            for key in ("alpha", "targets")
            if getattr(self, key) != fields[key].default
        ]
        if changed and not self.rank:
            raise UserError(
                f"lora.{changed[0]} has no effect with lora.rank=0; set lora.rank, or leave it out"
            )
        if self.dropout:
            raise UserError(
                f"lora.dropout={self.dropout:g}: with dropout the trained policy would not be the "
                "one that was sampled; leave it at 0"
            )
        return self

    @property
    def feed_forward_targets(self) -> set[str]:
        """The targets in MLPs and experts."""
        return {"gate_proj", "up_proj", "down_proj"} & set(self.targets)


def describe_lora(lora: LoraConfig) -> str:
    """Return the adapters in words, such as "LoRA, rank 8"."""
    text = f"LoRA, rank {lora.rank}"
    if set(lora.targets) != set(get_args(LoraTarget)):
        text += f" on {', '.join(lora.targets)}"
    return text


class RolloutConfig(Section):
    engine: Annotated[str, ADJUSTABLE] = "hf"
    """hf: Hugging Face transformers; vllm: vLLM."""
    tp: Annotated[int, FREE] = Field(1, ge=1)
    """Tensor-parallel size of one vLLM engine; need not be parallel.tp."""
    gpu_memory_fraction: Annotated[float, FREE] = Field(0.5, gt=0, lt=1)
    """Share of a GPU that vLLM fills with weights and KV cache."""
    kv_cache_bytes: Annotated[int | None, FREE] = Field(None, ge=1)
    """KV cache of each vLLM rank; by default what gpu_memory_fraction leaves."""
    group_size: Annotated[int, ADJUSTABLE] = Field(8, ge=1, lt=2**31)
    """G: responses sampled for each problem."""
    temperature: Annotated[float, ADJUSTABLE] = Field(1.0, ge=0)
    """Anything but 1 is off-policy and gets a warning."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Nucleus sampling."""
    max_response_tokens: Annotated[int, ADJUSTABLE] = Field(3500, ge=1)
    """L: longest response, end token included."""
    batch_size: Annotated[int, FREE] = Field(256, ge=1, lt=2**31)
    """Responses decoded at once by one engine."""
    seeded: bool = True
    """Each response from a seed of its own. false: vLLM's faster sampler on GPUs; a repeated or
    resumed run then samples other responses (docs/rollouts.md).
    """
    deep_sleep: Annotated[bool, FREE] = False
    """On GPUs a sleeping vLLM gives up its CUDA graphs and NCCL's buffers too, which no card has
    shown yet.
    """
    speculative: dict[str, Any] | None = None
    """vLLM's speculative_config, such as {method: ngram, ...} (docs/rollouts.md)."""

    @model_validator(mode="after")
    def _check_temperature(self) -> Self:
        """Errors: `UserError` for greedy decoding."""
        if self.temperature == 0:
            raise UserError(
                "rollout.temperature=0: all responses to a problem would be the same, and a group "
                "of equal ones teaches nothing; set it above 0 (eval.temperature=0 evaluates "
                "greedily)"
            )
        return self


class SyncConfig(Section):
    verify: Annotated[Literal["off", "checksum", "full"], FREE] = "full"
    """Proof after every weight sync: checksums of every engine parameter; full: also log-probs of
    some responses.
    """
    bucket_mb: Annotated[int, FREE] = Field(256, ge=1)
    """Size of the buckets that weights travel in, in MiB."""
    logprob_alarm: Annotated[float | None, FREE] = Field(None, gt=0)
    """Warn above this mean log-prob difference of engine and trainer; by default 0.001 in float32,
    0.05 in bfloat16. A run with ten times as much at its start ends.
    """


class OptimizerConfig(Section):
    lr: Annotated[float, ADJUSTABLE] = Field(1e-7, gt=0)
    """AdamW learning rate after warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After warm-up; cosine reaches min_lr at the last step."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the cosine schedule."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; never on biases and norms."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW."""
    eps: PositiveFloat = 1e-8
    """AdamW."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest gradient norm; 0: no clipping."""


class ParallelConfig(Section):
    tp: int = Field(1, ge=1)
    """Tensor-parallel size."""
    pp: int = Field(1, ge=1)
    """Pipeline-parallel size."""
    cp: int = Field(1, ge=1)
    """Context-parallel size: the ranks that share every sequence of a pack."""
    ep: int = Field(1, ge=1)
    """Expert-parallel size: the ranks that share a layer's experts."""
    etp: int | None = Field(None, ge=1)
    """Tensor-parallel size of the experts, with parallel.ep; null: parallel.tp."""
    vpp: int | None = Field(None, ge=2)
    """Virtual pipeline stages on each pipeline rank (interleaved 1F1B)."""
    sequence_parallel: bool = False
    """Shard the norms' activations over the tensor-parallel ranks."""
    overlap_grad_reduce: bool = True
    """Reduce gradients while the backward pass still runs."""

    @property
    def sequence_shards(self) -> int:
        """Number of ranks that divide hidden states under sequence parallelism, otherwise 1."""
        return self.tp if self.sequence_parallel else 1

    @property
    def expert_tp(self) -> int:
        """Number of ranks that share each expert."""
        return self.etp or self.tp

    @property
    def replica_size(self) -> int:
        """Number of ranks of one data-parallel replica."""
        return self.tp * self.pp * self.cp

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that hold all experts once, if there are experts."""
        return self.expert_tp * self.ep * self.pp


class TrainConfig(Section):
    max_tokens_per_microbatch: Annotated[int, FREE] = Field(16384, ge=1, lt=2**31)
    """Tokens packed into a micro-batch, times parallel.cp; a longer sequence gets its own."""
    cross_entropy: Literal["auto", "te", "fused_linear"] = "auto"
    """te: TransformerEngine's; fused_linear: from hidden states, a chunk of logits at a time; auto:
    the fastest that fits.
    """
    recompute: Annotated[Literal["none", "selective", "full"], FREE] = "none"
    """Activations recomputed in the backward pass: those of feed-forward parts (selective), or of
    whole layers (full).
    """
    routing_replay: bool = False
    """Every token goes to the experts that the rollout engine chose for it; for mixtures of
    experts.
    """
    offload: Annotated[OffloadLevel | Literal["auto"], FREE] = "none"
    """GPU memory that the trainer gives up while the engine samples: its gradients; also the
    optimizer; also the weights (docs/rollouts.md). auto: the least with which a plan fits.
    """

    @property
    def offload_level(self) -> OffloadLevel:
        """The level of `offload`; none for auto, in whose place commands put a level."""
        return "none" if self.offload == "auto" else self.offload
