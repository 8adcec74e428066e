"""Engines, how they sample, and how weights come to them."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from megatron_opsft.config_section import FREE, Section
from megatron_opsft.errors import UserError


class RolloutConfig(Section):
    engine: str = Field("hf", description="hf: Hugging Face transformers; vllm: vLLM.")
    tp: int = Field(
        1, ge=1, description="Tensor-parallel size of one vLLM engine; need not be parallel.tp."
    )
    gpu_memory_fraction: float = Field(
        0.5, gt=0, lt=1, description="Share of a GPU that vLLM fills with weights and KV cache."
    )
    kv_cache_bytes: int | None = Field(
        None,
        ge=1,
        description="KV cache of each vLLM rank; by default what gpu_memory_fraction leaves.",
    )
    group_size: int = Field(8, ge=1, description="G: responses sampled for each problem.")
    temperature: float = Field(
        1.0,
        ge=0,
        description="Sampling temperature; anything but 1 is off-policy and gets a warning.",
    )
    top_p: float = Field(0.95, gt=0, le=1, description="Nucleus sampling.")
    max_response_tokens: int = Field(
        3500, ge=1, description="L: longest response, end token included."
    )
    batch_size: int = Field(256, ge=1, description="Responses decoded at once by one engine.")
    seeded: bool = Field(
        True,
        description="Each response from a seed of its own. false: vLLM's faster sampler on GPUs; responses then depend on their batch, so a repeated or resumed run samples others (docs/rollouts.md).",
    )
    deep_sleep: Annotated[bool, FREE] = Field(
        True,
        description="On GPUs CUDA graphs and NCCL's buffers of a sleeping vLLM leave the GPU too; false: only weights and KV cache do.",
    )
    speculative: dict[str, Any] | None = Field(
        None,
        description="vLLM's speculative_config, such as {method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 4}. Responses keep their distribution; a repeated run may sample others (docs/rollouts.md).",
    )

    @model_validator(mode="after")
    def _responses_differ(self) -> Self:
        """Errors: `UserError` for greedy decoding."""
        if self.temperature == 0:
            raise UserError(
                "rollout.temperature=0: all responses to a problem would be the same, and a group of "
                "equal ones teaches nothing; set it above 0 (eval.temperature=0 evaluates greedily)"
            )
        return self


class SyncConfig(Section):
    verify: Literal["off", "checksum", "full"] = Field(
        "full",
        description="Proof after every weight sync: checksums of every engine parameter; full: also log-probs of some responses.",
    )
    bucket_mb: int = Field(
        256,
        ge=1,
        description="Size of the buckets that weights travel in, in MiB.",
    )
    logprob_alarm: float | None = Field(
        None,
        gt=0,
        description="Mean difference of engine and trainer log-probs that warns; by default 0.001 in float32, 0.05 in bfloat16.",
    )
