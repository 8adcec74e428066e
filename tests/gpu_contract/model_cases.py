"""Models and layouts that are built without memory: TransformerEngine's, and vLLM's engines."""

from dataclasses import dataclass, fields, replace

from plan_cases import REAL_SHAPES

from megatron_opsft.architectures.shape import ModelShape, RopeScaling

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
    """num_layers: instead of the model's, all of which are alike. grouped: the experts, as every
    run with TransformerEngine has them; else one linear each, which only a checkpoint's keys are
    compared for.
    """

    model: str
    num_layers: int | None = None
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    grouped: bool = True
    deterministic: bool = False

    @property
    def shape(self) -> ModelShape:
        shape = SHAPES[self.model]
        return replace(shape, num_layers=self.num_layers or shape.num_layers)

    @property
    def sequence_parallel(self) -> bool:
        """With experts it has to be; else with every other tensor-parallel size."""
        return self.tp > 1 and (self.shape.moe is not None or self.tp == 2)

    def __str__(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        defaults = {each.name: each.default for each in fields(self)}
        return " ".join(f"{n}={v}" for n, v in values.items() if v != defaults[n])


DENSE = [
    TeCase(model="R1-Distill-Qwen-1.5B"),
    TeCase(model="R1-Distill-Qwen-7B", num_layers=4, tp=4),
    TeCase(model="R1-Distill-Qwen-7B", num_layers=4, tp=2, pp=2, deterministic=True),
    TeCase(model="R1-Distill-Qwen-7B", num_layers=8, tp=1, pp=2, vpp=2),
    TeCase(model="Qwen2.5-1.5B", num_layers=4, tp=2, pp=2),
    TeCase(model="Qwen3-8B", num_layers=8, tp=2, pp=2, vpp=2),
    TeCase(model="Llama-3.1-8B", tp=4),
    TeCase(model="Llama-3.2-1B", num_layers=4, tp=2),
    TeCase(model="Mistral-7B-v0.3", num_layers=4, tp=2, pp=2),
]
EXPERTS = [
    TeCase(model="Qwen3-30B-A3B", num_layers=2),
    TeCase(model="Qwen3-30B-A3B", num_layers=4, tp=2, pp=2),
    TeCase(model="Qwen3-30B-A3B", num_layers=2, tp=2, grouped=False),
    TeCase(model="Qwen3-30B-A3B", num_layers=2, dp=8, ep=8),
    TeCase(model="Qwen3-30B-A3B", num_layers=2, tp=2, dp=4, ep=8, etp=1),
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
