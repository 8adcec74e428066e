"""The model, its update, and where its parts are."""

from typing import Annotated, Literal

from pydantic import Field

from megatron_opsft.config_section import FREE, HomeExpanded, Section


class ModelConfig(Section):
    path: Annotated[str, HomeExpanded] = Field(
        ...,
        description="A Hugging Face directory or hub name, a run, a checkpoint, or `tiny_reasoner` (shipped).",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16",
        description="Of weights and activations; main weights and gradients are float32.",
    )
    load: Annotated[Literal["auto", "disk", "engine"], FREE] = Field(
        "auto",
        description="disk: every rank reads its shards from the files. engine: vLLM reads the files, and shards are filled from its parameters. auto: engine where possible, else disk.",
    )


class OptimizerConfig(Section):
    lr: float = Field(1e-7, gt=0, description="AdamW learning rate after warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    schedule: Literal["constant", "cosine"] = Field(
        "constant", description="After warm-up; cosine reaches min_lr at the last step."
    )
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the cosine schedule.")
    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled weight decay; never on biases and norms."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW.")
    eps: float = Field(1e-8, gt=0, description="AdamW.")
    clip_grad: float = Field(1.0, ge=0, description="Largest gradient norm; 0: no clipping.")


class ParallelConfig(Section):
    tp: int = Field(1, ge=1, description="Tensor-parallel size.")
    pp: int = Field(1, ge=1, description="Pipeline-parallel size.")
    cp: int = Field(
        1, ge=1, description="Context-parallel size: the ranks that share every sequence of a pack."
    )
    ep: int = Field(
        1,
        ge=1,
        description="Expert-parallel size: the ranks that share the experts of a mixture, each holding whole ones.",
    )
    etp: int | None = Field(
        None,
        ge=1,
        description="Tensor-parallel size of the experts; null: parallel.tp. Only with parallel.ep above 1.",
    )
    vpp: int | None = Field(
        None, ge=2, description="Virtual pipeline stages on each pipeline rank (interleaved 1F1B)."
    )
    sequence_parallel: bool = Field(
        False, description="Shard the norms' activations over the tensor-parallel ranks."
    )
    overlap_grad_reduce: bool = Field(
        True,
        description="Reduce gradients over the data-parallel ranks while the backward pass still runs.",
    )
    overlap_param_gather: bool = Field(
        True,
        description="Gather updated weights while the rollout engine wakes up; needs overlap_grad_reduce.",
    )

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert."""
        return self.etp or self.tp

    @property
    def replica_size(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.tp * self.pp * self.cp

    @property
    def replica(self) -> str:
        """Their number, for a message."""
        if self.cp == 1:
            return f"parallel.tp x parallel.pp = {self.tp} x {self.pp}"
        return f"parallel.tp x parallel.pp x parallel.cp = {self.tp} x {self.pp} x {self.cp}"


class TrainConfig(Section):
    max_tokens_per_microbatch: Annotated[int, FREE] = Field(
        16384,
        ge=1,
        description="Packing budget of a rank, times parallel.cp; a longer sequence gets its own micro-batch.",
    )
    cross_entropy: Literal["auto", "te", "fused_linear"] = Field(
        "auto",
        description="te: TransformerEngine's; fused_linear: from hidden states, a chunk of logits at a time; auto: the fastest that fits.",
    )
    recompute: Annotated[Literal["none", "selective", "full"], FREE] = Field(
        "none",
        description="Activations computed again in the backward pass: of feed-forward parts (selective), or of whole layers (full).",
    )
    routing_replay: bool = Field(
        False,
        description="Every token goes to the experts that the rollout engine chose for it; for mixtures of experts.",
    )
    offload_layers: int = Field(
        0,
        ge=0,
        description="Layers that keep activations in CPU memory; needs TransformerEngine, parallel.pp=1 and no recomputation.",
    )
