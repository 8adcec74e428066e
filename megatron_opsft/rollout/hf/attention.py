"""Attention for decoding that reads each key/value head once.

transformers repeats the key/value heads of grouped-query attention in memory, at every layer and
token, as soon as there is padding to mask. For a single query token the query heads that share a
key/value head can stand where query positions stand, and nothing needs repeating.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "grouped_sdpa"  # the name to give as attn_implementation


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, [B, Q, Hq, D].

    query: [B, Hq, Q, D]; key and value: [B, Hkv, T, D]; attention_mask: bool [B, 1, Q, T] or None.
    """
    rows, num_heads, num_queries, _ = query.shape
    num_kv_heads = key.shape[1]
    if num_queries > 1 or num_heads == num_kv_heads or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    grouped = query.reshape(rows, num_kv_heads, num_heads // num_kv_heads, query.shape[-1])
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(rows, 1, num_heads, value.shape[-1]), None


AttentionInterface.register(GROUPED_SDPA, _attend)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
