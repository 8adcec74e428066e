"""The likeliest next tokens, straight from hidden states: the output layer's product in chunks.

As in `fused_linear`, no more than one chunk of logits exists at a time. Suffixes: P positions, K
tokens at each, C those of a chunk, V rows of the weight, H hidden size.
"""

import torch
from torch import Tensor

from megatron_opsft.loss.fused_linear import token_statistics
from megatron_opsft.loss.loss_memory import DEFAULT_CHUNKS, Chunks
from megatron_opsft.loss.output_head import OutputHead
from megatron_opsft.loss.products import times_transposed
from megatron_opsft.runtime.distributed import gather_over


@torch.no_grad()
def top_tokens(
    hidden_TH: Tensor,
    head: OutputHead,
    positions_P: Tensor,
    count: int,
    *,
    chunks: Chunks = DEFAULT_CHUNKS,
) -> tuple[Tensor, Tensor]:
    """Ids in the whole vocabulary, int64 [P, K], and log-probs, float32 [P, K], falling.

    K: `count`, or the vocabulary where that is smaller. Called by all ranks of the tensor-parallel
    group with the same arguments, but for the weight.
    """
    count = min(count, head.vocab_size)
    tokens, size = chunks.sizes(len(head.weight_VH))
    parts = [
        _of_chunk(hidden_TH[part_C], head, count, size) for part_C in positions_P.split(tokens)
    ]
    ids_PK = torch.cat([ids for ids, _ in parts])
    logits_PK = torch.cat([logits for _, logits in parts])
    if not len(positions_P):
        return ids_PK, logits_PK
    first = token_statistics(hidden_TH, head, positions_P, ids_PK[:, 0], chunks=chunks)
    logits_PK /= head.temperature
    return ids_PK, logits_PK - logits_PK[:, :1] + first.log_probs_R[:, None]


def _of_chunk(hidden_CH: Tensor, head: OutputHead, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Ids and logits [C, K] over the whole vocabulary."""
    logits_CK = hidden_CH.new_full((len(hidden_CH), count), -torch.inf, dtype=torch.float32)
    ids_CK = torch.zeros_like(logits_CK, dtype=torch.int64)
    for first, stop in head.blocks(size):
        own_CV = times_transposed(hidden_CH, head.weight_VH[first:stop])
        found = own_CV.topk(min(count, stop - first))
        del own_CV  # before the next ones
        ids_CK, logits_CK = _best(
            count,
            torch.cat([ids_CK, found.indices + head.first_row + first], 1),
            torch.cat([logits_CK, found.values], 1),
        )
    if head.group.size() == 1:
        return ids_CK, logits_CK
    return _best(
        count,
        torch.cat(gather_over(ids_CK, head.group), 1),
        torch.cat(gather_over(logits_CK, head.group), 1),
    )


def _best(count: int, ids_CN: Tensor, logits_CN: Tensor) -> tuple[Tensor, Tensor]:
    found = logits_CN.topk(count)
    return ids_CN.gather(1, found.indices), found.values
