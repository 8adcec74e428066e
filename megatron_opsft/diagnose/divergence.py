"""D_t of every response token of a micro-batch, and what the efficient model prefers where it is
large.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megatron_opsft.batching.microbatch import build_microbatch
from megatron_opsft.diagnose.vocabulary import kl_divergence, top_tokens
from megatron_opsft.loss.fused_linear import token_statistics
from megatron_opsft.loss.loss_memory import DEFAULT_CHUNKS, Chunks
from megatron_opsft.model.frozen import FrozenModel
from megatron_opsft.records import Sample
from megatron_opsft.runtime.distributed import broadcast_over

NUM_PREFERRED = 3
_SHARE, _AT_LEAST, _AT_MOST = 0.05, 32, 256  # tokens of a response with alternatives


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """At one token: its probabilities, and (id, probability) of the efficient model's likeliest."""

    position: int
    p_original: float
    p_efficient: float
    preferred: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Of one response. kl: D_t of every token; preferences: by position, where D_t is largest."""

    kl: tuple[float, ...]
    preferences: tuple[Preference, ...]


def diverge(
    original: FrozenModel,
    efficient: FrozenModel,
    samples: Sequence[Sample],
    *,
    align: int,
    chunks: Chunks = DEFAULT_CHUNKS,
) -> list[Divergence]:
    """Both models read all samples in one pack. align: see `build_microbatch`.

    Called by all ranks of a tensor-parallel group with the same samples; the same on each.
    """
    device = next(original.model.parameters()).device
    batch = build_microbatch(samples, [1.0] * len(samples), align=align, device=device)
    hidden_p, head_p = original.hidden_states(batch)
    hidden_q, head_q = efficient.hidden_states(batch)
    at_R, labels_R = batch.loss_indices_R, batch.labels_R
    kl_R = kl_divergence(hidden_p, head_p, hidden_q, head_q, at_R, chunks=chunks)
    broadcast_over(kl_R, 0, head_p.group)  # what follows must be the same choice everywhere
    ends = list(accumulate(batch.response_lengths))
    chosen = [_largest(kl_R[a:b]) + a for a, b in zip([0, *ends], ends, strict=False)]
    chosen_P = torch.cat(chosen)
    at_P, labels_P = at_R[chosen_P], labels_R[chosen_P]
    log_p = token_statistics(hidden_p, head_p, at_P, labels_P, chunks=chunks).log_probs_R
    log_q = token_statistics(hidden_q, head_q, at_P, labels_P, chunks=chunks).log_probs_R
    ids_PK, logs_PK = top_tokens(hidden_q, head_q, at_P, NUM_PREFERRED, chunks=chunks)
    columns = zip(
        chosen_P.tolist(),
        log_p.exp().tolist(),
        log_q.exp().tolist(),
        ids_PK.tolist(),
        logs_PK.exp().tolist(),
        strict=True,
    )
    flat, rows = kl_R.tolist(), list(columns)
    return [
        Divergence(
            kl=tuple(flat[a:b]),
            preferences=tuple(
                Preference(
                    position=place - a,
                    p_original=p,
                    p_efficient=q,
                    preferred=tuple(zip(ids, probabilities, strict=True)),
                )
                for place, p, q, ids, probabilities in rows
                if a <= place < b
            ),
        )
        for a, b in zip([0, *ends], ends, strict=False)
    ]


def _largest(kl_R: Tensor) -> Tensor:
    """Places of the largest that are not 0, ascending."""
    count = min(max(_AT_LEAST, int(_SHARE * len(kl_R))), _AT_MOST, len(kl_R))
    found = kl_R.topk(count)
    return found.indices[found.values > 0].sort().values
