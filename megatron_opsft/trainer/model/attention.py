"""Modules of ours for Megatron's layer spec where TransformerEngine is not there.

`PackedAttention` takes Megatron's place for packed (THD) sequences: one causal scaled-dot-product
attention per sequence, so memory never grows with the square of the pack. In a context-parallel
group it gathers keys and values, where TransformerEngine lets them go round: the same sums, and so
the oracle of that. `RMSNorm` allows sequence parallelism.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_opsft.trainer.batching.microbatch import joined_order, own_pieces


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm over the last axis; computes in float32, returns the input's dtype."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-6,
        **unused: Any,
    ) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        # Under sequence parallelism each rank sees a part of the tokens; Megatron sums the
        # gradients of parameters marked so over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return super().forward(x)
        normed = F.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return self.weight * normed.to(x.dtype)


class PackedAttention(torch.nn.Module):
    """Causal attention of packed sequences, called as Megatron's core attention is."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.context: ProcessGroup | None = None
        if config.context_parallel_size > 1 and pg_collection is not None:
            self.context = pg_collection.cp

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
        """query [T, heads, d], key and value [T, kv heads, d] -> [T, heads * d]; of this rank's
        part of the pack in a context-parallel group, whose ranks all call it.
        """
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        if self.context is not None:
            return self._attend_to_all(query, key, value, lengths, self.context)
        parts = zip(
            query.split(lengths), key.split(lengths), value.split(lengths), strict=True
        )
        outputs = [self._attend(q, k, v) for q, k, v in parts]
        return torch.cat(outputs).flatten(1)

    def _attend_to_all(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: list[int],
        group: ProcessGroup,
    ) -> Tensor:
        """Each of this rank's two pieces of a sequence attends to all that is not behind it."""
        rank, size = group.rank(), group.size()
        # The backward pass adds up what the ranks' queries say of a key.
        gathered = gather_from_sequence_parallel_region(
            torch.stack((key, value), dim=1),
            tensor_parallel_output_grad=True,
            group=group,
        )
        order = joined_order(lengths, size).to(gathered.device)
        keys, values = gathered[order].unbind(1)
        outputs: list[Tensor] = []
        parts = zip(
            query.split([n // size for n in lengths]),
            keys.split(lengths),
            values.split(lengths),
            strict=True,
        )
        for q, k, v in parts:
            for piece, number in zip(q.chunk(2), own_pieces(rank, size), strict=True):
                end = (number + 1) * len(piece)
                outputs.append(self._attend(piece, k[:end], v[:end]))
        return torch.cat(outputs).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[n, heads, d]: the last n queries of a sequence of as many keys and values as there are
        given, causal.
        """
        mask = None
        if len(key) != len(query):
            mask = query.new_ones(len(query), len(key), dtype=torch.bool)
            mask = mask.tril(len(key) - len(query))
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return out[0].transpose(0, 1)
