"""Modules of ours for Megatron's layer spec where TransformerEngine is not there.

`PackedAttention` takes Megatron's place for packed (THD) sequences: one causal scaled-dot-product
attention per sequence, so memory never grows with the square of the pack. `RMSNorm` allows
sequence parallelism.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last axis; computes in float32, returns the input's dtype."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees a part of the tokens; Megatron sums the
        # gradients of parameters marked so over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        normed = F.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return self.weight * normed.to(x.dtype)


class PackedAttention(torch.nn.Module):
    """Causal attention of packed sequences, called as Megatron's core attention is."""

    def __init__(
        self, config: TransformerConfig, *args: Any, softmax_scale: float | None = None, **kw: Any
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams,
        **unused: Any,
    ) -> Tensor:
        """query [T, heads, d], key and value [T, kv heads, d] -> [T, heads * d]."""
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        outputs = [self._attend(q, k, v) for q, k, v in parts]
        return torch.cat(outputs).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One sequence: [n, heads, d] each -> [n, heads, d]."""
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return out[0].transpose(0, 1)
