"""Our own modules for Megatron's layer spec, used without TransformerEngine.

`PackedAttention` replaces Megatron's attention for packed (THD) sequences: one causal
scaled-dot-product attention per sequence, so memory never grows with the square of the pack. In a
context-parallel group it gathers keys and values, while TransformerEngine passes them around: the
sums are the same, so it can check TransformerEngine's. `RMSNorm` allows sequence parallelism.
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
    """Root-mean-square norm over the last axis, computed in float32; keeps the input's dtype.

    It multiplies by its weight, or by 1 + weight if the config says that norms are zero-centred.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-6,
        **unused: Any,
    ) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self._is_zero_centered = config.layernorm_zero_centered_gamma
        # Under sequence parallelism each rank sees some of the tokens; Megatron sums the gradients
        # of parameters with this mark over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if self._is_zero_centered:
            normed = F.rms_norm(x.float(), self.weight.shape, None, self.eps)
            return (normed * (1.0 + self.weight.float())).to(x.dtype)
        if x.dtype == torch.float32:
            return super().forward(x)
        normed = F.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return self.weight * normed.to(x.dtype)


class PackedAttention(torch.nn.Module):
    """Causal attention of packed sequences, with the interface of Megatron's core attention."""

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
        """Return the output [T, heads * d] for query [T, heads, d], key and value [T, kv heads, d].

        In a context-parallel group all ranks call it; T counts this rank's tokens of the pack.
        """
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        if self.context is not None:
            return self._attend_to_all(query, key, value, lengths, self.context)
        sequences = zip(
            query.split(lengths), key.split(lengths), value.split(lengths), strict=True
        )
        outputs = [self._attend(q, k, v) for q, k, v in sequences]
        return torch.cat(outputs).flatten(1)

    def _attend_to_all(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: list[int],
        group: ProcessGroup,
    ) -> Tensor:
        """Let each of this rank's two pieces of a sequence attend to itself and all tokens before.

        lengths: tokens of each whole sequence of the pack.
        """
        size = group.size()
        # The backward pass sums a key's gradients over the ranks' queries.
        gathered = gather_from_sequence_parallel_region(
            torch.stack((key, value), dim=1),
            tensor_parallel_output_grad=True,
            group=group,
        )
        order = joined_order(lengths, size).to(gathered.device)
        keys, values = gathered[order].unbind(1)
        outputs: list[Tensor] = []
        for queries, k, v in zip(
            query.split([length // size for length in lengths]),
            keys.split(lengths),
            values.split(lengths),
            strict=True,
        ):
            numbers = own_pieces(group.rank(), size)
            for piece, number in zip(queries.chunk(2), numbers, strict=True):
                end = (number + 1) * len(piece)
                outputs.append(self._attend(piece, k[:end], v[:end]))
        return torch.cat(outputs).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the causal attention [n, heads, d] of the last n queries of a sequence to all its
        keys and values.
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
