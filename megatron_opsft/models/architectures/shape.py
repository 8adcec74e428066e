"""The sizes and switches of one model, and the floating-point operations that follow from them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from megatron_opsft.records import record


@record
class Llama3Scaling:
    """Llama 3's rotary frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@record
class YarnScaling:
    """YaRN's rotary frequency scaling (`rope_type: yarn`; arXiv:2309.00071), as transformers and
    vLLM compute it.
    """

    factor: float
    """What the longest waves are stretched by; at least 1."""
    original_max_position: int
    """Positions for which the model was trained without scaling."""
    attention_factor: float
    """What every rotated query and key is multiplied by, attention scores by its square."""
    beta_fast: float
    """A wave that turns more often than this in the original positions is left as it is."""
    beta_slow: float
    """A wave that turns less often than this is stretched by the whole `factor`; in between there
    is a linear blend.
    """
    truncate: bool
    """True: the blend begins and ends at whole pairs of a head's numbers."""


RopeScaling = Llama3Scaling | YarnScaling


@record
class MoeShape:
    """SwiGLU experts in place of each layer's MLP; a token uses the `top_k` most probable ones."""

    num_experts: int
    top_k: int
    ffn_size: int
    """Feed-forward size of one expert."""
    normalize_top_k: bool
    """True: the weights of a token's experts are their router probabilities, divided by the sum of
    these. False: the probabilities themselves, a softmax over all experts.
    """
    shared_ffn_size: int = 0
    """Feed-forward size of the expert that every token uses too, times a sigmoid gate of its own;
    0: there is none.
    """


LayerKind = Literal["full_attention", "linear_attention"]
"""What mixes the tokens of a layer, as config.json says it: attention, or a gated delta net."""

CHUNK_LENGTH = 64
"""Tokens that a gated delta net computes together; flash-linear-attention's chunks are as long."""


@record
class DeltaShape:
    """The gated delta net of a layer without attention (arXiv:2412.06464). Its state is a matrix
    [key_head_dim, value_head_dim] for each value head, whatever the length of the sequence.
    """

    num_key_heads: int
    num_value_heads: int
    """A multiple of `num_key_heads`: value heads share query and key heads."""
    key_head_dim: int
    value_head_dim: int
    conv_size: int
    """Tokens that the causal convolution of queries, keys and values sees."""

    @property
    def key_size(self) -> int:
        """Numbers of a token's keys, and of its queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Numbers of a token's values, and of their gates."""
        return self.num_value_heads * self.value_head_dim

    @property
    def state_size(self) -> int:
        """Numbers of the states of all value heads."""
        return self.value_size * self.key_head_dim

    @property
    def conv_channels(self) -> int:
        """Numbers of a token's queries, keys and values, which the convolution mixes in time."""
        return 2 * self.key_size + self.value_size

    @property
    def projected_size(self) -> int:
        """Numbers that a token's hidden states are projected to: those, the gates of values, and
        two numbers of each value head.
        """
        return self.conv_channels + self.value_size + 2 * self.num_value_heads


@record
class ModelShape:
    """A decoder with RMSNorm, SwiGLU MLPs, and grouped-query attention with rotary positions; some
    of its layers may have a gated delta net instead of attention.
    """

    architecture: str
    """Hugging Face class name, a key of `families.ARCHITECTURES`."""
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the Hugging Face embedding, without any padding of ours."""
    tied_embeddings: bool
    qkv_bias: bool
    """True if q, k and v have biases; nothing else has."""
    qk_norm: bool
    """True if there is an RMSNorm over each head of q and k."""
    norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    moe: MoeShape | None = None
    """The experts, instead of MLPs of `ffn_size`; None for a dense model."""
    rotary_dim: int | None = None
    """How many of a head's numbers rotary positions turn, the first ones; None: all."""
    gated_attention: bool = False
    """True if each head's output is multiplied by a gate of its own."""
    zero_centered_norms: bool = False
    """True if norms, except a gated delta net's own, multiply by 1 + weight."""
    delta: DeltaShape | None = None
    """The gated delta nets; None if every layer has attention."""
    layer_kinds: tuple[LayerKind, ...] = ()
    """The kind of each layer of a model with `delta`."""

    def kind_of(self, layer: int) -> LayerKind:
        """Return the kind of the layer with this global index."""
        return self.layer_kinds[layer] if self.delta else "full_attention"

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention, which alone have a key/value cache."""
        if self.delta is None:
            return self.num_layers
        return self.layer_kinds.count("full_attention")

    @property
    def num_delta_layers(self) -> int:
        """Layers with a gated delta net."""
        return self.num_layers - self.num_attention_layers

    def with_layers(self, layers: Sequence[int]) -> "ModelShape":
        """Return a model of these layers alone, such as those of a pipeline stage."""
        kinds = tuple(self.kind_of(layer) for layer in layers) if self.delta else ()
        return replace(self, num_layers=len(layers), layer_kinds=kinds)

    @property
    def shard_ffn(self) -> tuple[str, int]:
        """(config field, size) of the feed-forward layer, which tensor parallelism cuts."""
        if self.moe is None:
            return "intermediate_size", self.ffn_size
        return "moe_intermediate_size", self.moe.ffn_size

    @property
    def active_ffn_size(self) -> int:
        """Feed-forward size that one token uses: the sum over its experts, shared or not."""
        if self.moe is None:
            return self.ffn_size
        return self.moe.top_k * self.moe.ffn_size + self.moe.shared_ffn_size


def weights_per_token(shape: ModelShape) -> int:
    """Return the number of weights of all layers that one token is multiplied with: in a mixture of
    experts those of its `top_k` experts, of a shared one with its gate, and of the router.
    """
    # Of queries and output, with their gates if there are any, and of keys and values.
    num_heads = (3 if shape.gated_attention else 2) * shape.num_heads
    num_heads += 2 * shape.num_kv_heads
    attention = shape.hidden_size * shape.head_dim * num_heads
    weights = shape.num_attention_layers * attention
    if delta := shape.delta:
        mixer = shape.hidden_size * (delta.projected_size + delta.value_size)
        mixer += delta.conv_size * delta.conv_channels
        weights += shape.num_delta_layers * mixer
    return weights + shape.num_layers * feed_forward_weights(shape)


def feed_forward_weights(shape: ModelShape) -> int:
    """Return the share of `weights_per_token` in the feed-forward part of one layer."""
    num_columns = 3 * shape.active_ffn_size
    if shape.moe is not None:  # the router has a row for each expert
        num_columns += shape.moe.num_experts + bool(shape.moe.shared_ffn_size)
    return shape.hidden_size * num_columns


def state_bytes(shape: ModelShape, dtype_bytes: int) -> int:
    """Return the bytes that an engine keeps of a sequence for its gated delta nets, whatever its
    length: float32 states, and what their convolutions need of the last tokens.
    """
    if shape.delta is None:
        return 0
    last_tokens = (shape.delta.conv_size - 1) * shape.delta.conv_channels
    layer = 4 * shape.delta.state_size + dtype_bytes * last_tokens
    return shape.num_delta_layers * layer


def state_products(shape: ModelShape) -> float:
    """Return how many products of two numbers the gated delta nets of all layers need for one
    token, beside those with weights; 0 without such layers.

    They are those of `trainer.model.delta_rule`, with L tokens in a chunk, K numbers of a key and V
    of a value, for each value head. Only the triangle below the diagonal counts, as in attention.
    Inside a chunk L/2 (3K + 2V): keys with keys and with queries; two triangular systems, whose
    solutions have K and V columns; the products of queries and keys with one solution. With the
    states 3KV: keys and queries read them, and keys write them.
    """
    if shape.delta is None:
        return 0.0
    key, value = shape.delta.key_head_dim, shape.delta.value_head_dim
    head = CHUNK_LENGTH / 2 * (3 * key + 2 * value) + 3 * key * value
    return shape.num_delta_layers * shape.delta.num_value_heads * head


def quadratic_at(shape: ModelShape) -> float:
    """Return the sequence length at which causal attention costs as much as all other products of
    the layers: n^2 x heads x head size in each layer with attention; infinity if none has it.
    """
    per_length = shape.num_attention_layers * shape.num_heads * shape.head_dim
    others = weights_per_token(shape) + state_products(shape)
    return others / per_length if per_length else math.inf


def forward_flops(
    shape: ModelShape, lengths: Iterable[int], num_loss_tokens: int
) -> float:
    """Return the floating-point operations of a forward pass over sequences of these lengths, with
    the output layer at `num_loss_tokens` positions. A backward pass costs twice as many.

    Only matrix products count, as usual: norms, activations and softmaxes are left out.
    """
    lengths = list(lengths)
    num_tokens = sum(lengths)
    attention = 2.0 * shape.num_heads * shape.head_dim * shape.num_attention_layers
    mixing = sum(n * n * attention for n in lengths)
    mixing += 2.0 * state_products(shape) * num_tokens
    return mixing + weight_flops(shape, num_tokens, num_loss_tokens)


def weight_flops(shape: ModelShape, num_tokens: int, num_loss_tokens: int) -> float:
    """Return the share of `forward_flops` in products with weights, over sequences of `num_tokens`
    together. Their gradients cost as much again.
    """
    layers = 2.0 * weights_per_token(shape) * num_tokens
    return layers + 2.0 * shape.hidden_size * shape.vocab_size * num_loss_tokens
