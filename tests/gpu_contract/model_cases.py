"""Models and layouts that are built without memory: TransformerEngine's, and vLLM's engines."""

from dataclasses import dataclass, replace
from typing import Any

from plan_cases import REAL_SHAPES

from megatron_opsft.architectures.shape import ModelShape, RopeScaling
from megatron_opsft.config import ParallelConfig

SHAPES = {name.removeprefix("DeepSeek-"): shape for name, shape in REAL_SHAPES.items()}
SHAPES["Qwen2.5-1.5B"] = replace(
    SHAPES["R1-Distill-Qwen-1.5B"], tied_embeddings=True, rope_theta=1e6
)
SHAPES["Mistral-7B-v0.3"] = replace(
    SHAPES["Qwen3-8B"],
    architecture="MistralForCausalLM",
    num_layers=32,
    ffn_size=14336,
    vocab_size=32768,
    qk_norm=False,
    norm_eps=1e-5,
    max_position_embeddings=32768,
)
SHAPES["Llama-3.1-8B"] = replace(
    SHAPES["Mistral-7B-v0.3"],
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    max_position_embeddings=131072,
    rope_theta=5e5,
    rope_scaling=RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    ),
)
SHAPES["Llama-3.2-1B"] = replace(
    SHAPES["Llama-3.1-8B"],
    num_layers=16,
    hidden_size=2048,
    ffn_size=8192,
    head_dim=64,
    tied_embeddings=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeCase:
    """num_layers: instead of the model's, all of which are alike."""

    model: str
    num_layers: int
    parallel: ParallelConfig = ParallelConfig()
    dp: int = 1
    deterministic: bool = False

    @property
    def shape(self) -> ModelShape:
        return replace(SHAPES[self.model], num_layers=self.num_layers)


def case(model: str, num_layers: int, dp: int = 1, **parallel: Any) -> TeCase:
    """Sequence parallel with experts, which need it, and with every other size."""
    tp, moe = parallel.get("tp", 1), SHAPES[model].moe
    layout = ParallelConfig(**parallel, sequence_parallel=tp == 2 or (tp > 1 and moe is not None))
    deterministic = tp == parallel.get("pp") == 2
    return TeCase(
        model=model, num_layers=num_layers, parallel=layout, dp=dp, deterministic=deterministic
    )


DENSE = [
    case("R1-Distill-Qwen-1.5B", 28),
    case("R1-Distill-Qwen-7B", 4, tp=4),
    case("R1-Distill-Qwen-7B", 8, pp=2, vpp=2),
    case("Qwen2.5-1.5B", 4, tp=2, pp=2),
    case("Qwen3-8B", 8, tp=2, pp=2, vpp=2),
    case("Llama-3.1-8B", 4, tp=4),
    case("Llama-3.2-1B", 4, tp=2),
    case("Mistral-7B-v0.3", 4, tp=2, pp=2),
]
EXPERTS = [
    case("Qwen3-30B-A3B", 4, tp=2, pp=2),
    case("Qwen3-30B-A3B", 2, dp=8, ep=8),
    case("Qwen3-30B-A3B", 2, dp=4, tp=2, ep=8, etp=1),
]
# Models and tensor-parallel sizes of vLLM: as many ranks as key/value heads, fewer and more.
ENGINES = [
    ("R1-Distill-Qwen-7B", 1),
    ("R1-Distill-Qwen-7B", 4),
    ("Qwen2.5-1.5B", 2),
    ("Qwen3-8B", 16),
    ("Llama-3.1-8B", 4),
    ("Mistral-7B-v0.3", 8),
    ("Qwen3-30B-A3B", 1),
    ("Qwen3-30B-A3B", 2),
    ("Qwen3-30B-A3B", 8),
]
