"""Divergences and likeliest next tokens, straight from hidden states: the output layer in chunks.

As in `fused_linear`, no more than one chunk of logits exists at a time. Suffixes: P positions, K
tokens at each, C those of a chunk, V rows of the weight, H hidden size.
"""

import torch
from torch import Tensor

from megatron_opsft.loss.fused_linear import token_statistics
from megatron_opsft.loss.gemms import times_transposed
from megatron_opsft.loss.logit_chunks import operations
from megatron_opsft.loss.loss_memory import DEFAULT_CHUNKS, Chunks
from megatron_opsft.loss.output_head import OutputHead
from megatron_opsft.loss.row_statistics import join_columns, join_ranks, no_columns
from megatron_opsft.runtime.distributed import gather_over


@torch.no_grad()
def kl_divergence(
    hidden_p_TH: Tensor,
    head_p: OutputHead,
    hidden_q_TH: Tensor,
    head_q: OutputHead,
    positions_R: Tensor,
    *,
    chunks: Chunks = DEFAULT_CHUNKS,
) -> Tensor:
    """KL(p || q) over the whole vocabulary at each position, in nats, float32 [R].

    Of two models with one vocabulary, sharded alike; hidden sizes and dtypes may differ. Two
    chunks of logits exist at a time. Called by all ranks of the tensor-parallel group.
    """
    if (head_p.vocab_size, len(head_p.weight_VH)) != (head_q.vocab_size, len(head_q.weight_VH)):
        raise ValueError(
            f"the heads differ: {len(head_p.weight_VH)} and {len(head_q.weight_VH)} rows a rank of "
            f"vocabularies of {head_p.vocab_size} and {head_q.vocab_size}"
        )
    ops = operations(hidden_p_TH.device)
    tokens, size = chunks.sizes(len(head_p.weight_VH))
    parts = [hidden_p_TH.new_zeros(0, dtype=torch.float32)]
    for part_C in positions_R.split(tokens):
        p_CH, q_CH = hidden_p_TH[part_C], hidden_q_TH[part_C]
        no_labels_C = torch.full_like(part_C, -1)
        p, q = no_columns(p_CH, mean=True), no_columns(q_CH, mean=False)
        for first, stop in head_p.blocks(size):
            of_p_CV = head_p.logits(p_CH, first, stop)
            of_q_CV = head_q.logits(q_CH, first, stop)
            q = join_columns(q, ops.row_statistics(of_q_CV, no_labels_C))
            p = join_columns(
                p, ops.row_statistics(of_p_CV, no_labels_C, of_q_CV.sub_(of_p_CV).neg_())
            )
            del of_p_CV, of_q_CV  # before the next ones
        p, q = join_ranks(p, head_p.group), join_ranks(q, head_q.group)
        assert p.mean_C is not None
        parts.append((p.mean_C - p.lse_C + q.lse_C).clamp_min(0.0).float())
    return torch.cat(parts)


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
