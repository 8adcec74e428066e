"""The sizes and switches of one model, and the floating-point operations that follow from them."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's rotary frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """SwiGLU experts in place of every layer's MLP; each token goes to the `top_k` most probable.

    ffn_size: of one expert.
    normalize_top_k: the weights of a token's experts are their router probabilities divided by
    those probabilities' sum; otherwise as the softmax over all experts gave them.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    normalize_top_k: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with grouped-query attention, RMSNorm, rotary positions and SwiGLU MLPs.

    architecture: the Hugging Face class name, a key of `families.ARCHITECTURES`.
    qkv_bias: biases on q, k, v (and on nothing else); qk_norm: RMSNorm over each head of q and k.
    vocab_size: rows of the Hugging Face embedding, without any padding of ours.
    moe: None for a dense model; otherwise no layer has an MLP of `ffn_size`.
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
    moe: MoeShape | None = None

    @property
    def shard_ffn(self) -> tuple[str, int]:
        """The feed-forward size that tensor parallelism cuts, after its config field."""
        if self.moe is None:
            return "intermediate_size", self.ffn_size
        return "moe_intermediate_size", self.moe.ffn_size


def layer_weights(shape: ModelShape) -> int:
    """Weights of one layer's products that one token meets; of the experts only its own."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    attention = shape.hidden_size * shape.head_dim * (heads + shape.num_heads)
    if shape.moe is None:
        return attention + 3 * shape.hidden_size * shape.ffn_size
    experts = 3 * shape.moe.top_k * shape.moe.ffn_size + shape.moe.num_experts
    return attention + shape.hidden_size * experts


def quadratic_at(shape: ModelShape) -> float:
    """The sequence length at which causal attention costs as much as all other products of a layer:
    2 n^2 x heads x head size = 2 n x weights.
    """
    return layer_weights(shape) / (shape.num_heads * shape.head_dim)


def forward_flops(
    shape: ModelShape, lengths: Iterable[int], num_loss_tokens: int
) -> float:
    """Floating-point operations of a forward pass over sequences of these lengths, with the output
    layer at `num_loss_tokens` positions; a backward pass costs twice as many.

    Products alone, as usual: norms, activations and softmaxes are left out.
    """
    per_token = 2.0 * layer_weights(shape)
    attention = 2.0 * shape.num_heads * shape.head_dim
    layers = sum(n * per_token + n * n * attention for n in lengths) * shape.num_layers
    return layers + 2.0 * shape.hidden_size * shape.vocab_size * num_loss_tokens
