"""A key/value cache that grows in place.

transformers' own dynamic layer concatenates at every token, so a response of L tokens copies its
cache L times.

Shapes: B rows, H key/value heads, C capacity, T tokens held, D head size.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_MIN_GROWTH = 64


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
        """Append [B, H, n, D] and return everything held."""
        held = self.keys.shape[-2]
        total = held + key_states.shape[-2]
        if total > self._key_buffer.shape[-2]:
            capacity = max(total + held // 4, held + _MIN_GROWTH)
            self._key_buffer = _grow(self.keys, capacity)
            self._value_buffer = _grow(self.values, capacity)
        self._key_buffer[:, :, held:total] = key_states
        self._value_buffer[:, :, held:total] = value_states
        self.keys = self._key_buffer[:, :, :total]
        self.values = self._value_buffer[:, :, :total]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`; the next update makes room again."""
        self.keys = self._key_buffer = self.keys[indices]
        self.values = self._value_buffer = self.values[indices]


def make_room(cache: DynamicCache) -> None:
    """Let the plain layers of a prefilled cache grow in place; sliding windows and states stay."""
    cache.layers = [
        GrowingLayer(layer.keys, layer.values) if type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]


def _grow(held: Tensor, capacity: int) -> Tensor:
    """A buffer [B, H, capacity, D] that begins with `held`."""
    buffer = torch.empty(
        (*held.shape[:2], capacity, held.shape[-1]), dtype=held.dtype, device=held.device
    )
    buffer[:, :, : held.shape[-2]] = held
    return buffer
