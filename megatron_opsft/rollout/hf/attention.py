"""Attention that reads each key/value head once, and a key/value cache that grows in place, for
decoding with transformers.

transformers repeats the key/value heads of grouped-query attention in memory, at every layer and
token, as soon as there is padding to mask. With a single query token, the query heads that share a
key/value head can take the place of query positions, and nothing has to be repeated. Two matrix
products are then faster than a fused kernel, which is made for blocks of queries.

transformers' dynamic cache concatenates at every token, so a response of L tokens copies its cache
L times.

Shapes of the cache: B rows, H key/value heads, C capacity, T tokens in it, D head size.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "grouped_sdpa"  # the name to give as attn_implementation
_MIN_GROWTH = 64


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention, [B, Q, Hq, D]; transformers calls it.

    query: [B, Hq, Q, D]; key and value: [B, Hkv, T, D]; attention_mask: bool [B, 1, Q, T] or None.
    """
    rows, num_heads, num_queries, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if num_queries > 1 or num_heads == num_kv_heads:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            **kwargs,
        )
    # [B, Hkv, Hq / Hkv, D]: the query heads of a key/value head in the place of query positions.
    grouped = query.reshape(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.matmul(grouped * scaling, key.transpose(-1, -2))
    if attention_mask is not None:
        scores.masked_fill_(~attention_mask, float("-inf"))
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    output = torch.matmul(shares, value)
    return output.reshape(rows, 1, num_heads, value.shape[-1]), None


AttentionInterface.register(GROUPED_SDPA, _attend)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` whose `keys` and `values` are views [B, H, T, D] of buffers [B, H, C, D]."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.keys, self.values = keys, values
        self._key_buffer, self._value_buffer = keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [B, H, n, D] and return all keys and values; transformers calls it. If the buffers
        are full, larger ones take their place.
        """
        length = self.keys.shape[-2]
        total = length + key_states.shape[-2]
        if total > self._key_buffer.shape[-2]:
            capacity = max(total + length // 4, length + _MIN_GROWTH)
            padding = (0, 0, 0, capacity - length)  # after the last token
            self._key_buffer = torch.nn.functional.pad(self.keys, padding)
            self._value_buffer = torch.nn.functional.pad(self.values, padding)
        self._key_buffer[:, :, length:total] = key_states
        self._value_buffer[:, :, length:total] = value_states
        self.keys = self._key_buffer[:, :, :total]
        self.values = self._value_buffer[:, :, :total]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep only the rows `beam_idx`; the next update makes new buffers."""
        self.keys = self._key_buffer = self.keys[beam_idx]
        self.values = self._value_buffer = self.values[beam_idx]


def make_room(cache: DynamicCache) -> None:
    """Replace the attention layers of a prefilled cache by layers that grow in place. Layers with a
    state of fixed size, such as gated delta nets', need no room and stay as they are.
    """
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer):
            cache.layers[index] = GrowingLayer(layer.keys, layer.values)
