"""Floating-point operations of a model's forward pass; a backward pass costs twice as many.

Products alone, as usual: norms, activations and softmaxes are left out.
"""

from collections.abc import Iterable

from megatron_opsft.architectures.shape import ModelShape


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


def forward_flops(shape: ModelShape, lengths: Iterable[int], num_loss_tokens: int) -> float:
    """FLOPs for sequences of these lengths, the output layer at `num_loss_tokens` positions."""
    per_token = 2.0 * layer_weights(shape)
    attention = 2.0 * shape.num_heads * shape.head_dim
    layers = sum(n * per_token + n * n * attention for n in lengths) * shape.num_layers
    return layers + 2.0 * shape.hidden_size * shape.vocab_size * num_loss_tokens
