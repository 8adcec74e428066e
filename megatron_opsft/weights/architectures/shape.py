"""The sizes and switches of one model, which weight tables and the model builder both need."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's rotary frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder with grouped-query attention, RMSNorm, rotary positions and a SwiGLU MLP.

    architecture: the Hugging Face class name, a key of `weights.architectures.ARCHITECTURES`.
    qkv_bias: biases on q, k, v (and on nothing else); qk_norm: RMSNorm over each head of q and k.
    vocab_size: rows of the Hugging Face embedding, without any padding of ours.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None = None
