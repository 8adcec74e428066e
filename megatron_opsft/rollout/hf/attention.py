"""Attention for decoding that reads each key/value head once.

transformers repeats the key/value heads of grouped-query attention in memory, at every layer and
token, as soon as there is padding to mask. For a single query token the query heads that share a
key/value head can stand where query positions stand, and nothing needs repeating. So they can for a
token with its draft.

Drafts differ in length, so a pass with drafts is one sequence of all tokens (`PackedQueries`) but
in attention, where each row meets its own keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "grouped_sdpa"  # the name to give as attn_implementation
FEW_QUERIES = 16  # a token and its draft; a prompt keeps the attention of transformers


@dataclass(frozen=True, slots=True)
class PackedQueries:
    """Where the M tokens of a packed pass stand: their rows and places among the row's tokens,
    int64 [M]; of so many rows, each with at most `width` tokens.
    """

    rows_M: Tensor
    ahead_M: Tensor
    num_rows: int
    width: int


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
    With `packed`, a `PackedQueries`, query is [1, Hq, M, D], and so is what comes back.
    """
    packed: PackedQueries | None = kwargs.pop("packed", None)
    if packed is not None:
        spread = query.new_zeros(packed.num_rows, packed.width, query.shape[1], query.shape[3])
        spread[packed.rows_M, packed.ahead_M] = query[0].transpose(0, 1)
        output, _ = _attend(
            *(module, spread.transpose(1, 2), key, value, attention_mask, dropout, scaling),
            **kwargs,
        )
        return output[packed.rows_M, packed.ahead_M][None], None
    rows, num_heads, num_queries, _ = query.shape
    num_kv_heads = key.shape[1]
    few = num_queries == 1 or (attention_mask is not None and num_queries <= FEW_QUERIES)
    if not few or num_heads == num_kv_heads or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    sharing = num_heads // num_kv_heads
    grouped = query.reshape(rows, num_kv_heads, sharing * num_queries, query.shape[-1])
    if num_queries > 1 and attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, sharing, 1)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    shape = (rows, num_heads, num_queries, value.shape[-1])
    return output.reshape(shape).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED_SDPA, _attend)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
