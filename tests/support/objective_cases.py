"""Objectives of every surrogate, and token losses that have a past: for the losses over the
vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_opsft.methods.objective import (
    Objective,
    SequenceClip,
    SquaredLogRatio,
    TokenClip,
)
from megatron_opsft.records import Sample
from megatron_opsft.trainer.batching.microbatch import build_microbatch
from megatron_opsft.trainer.loss.token_losses import TokenLosses, token_losses

OBJECTIVES = [
    Objective(surrogate=TokenClip(low=0.1, high=0.2, dual=1.3)),
    Objective(surrogate=TokenClip(), beta=0.3, temperature=0.6),
    Objective(beta=0.3, kl="k2"),
    Objective(surrogate=SequenceClip(low=0.01, high=0.01)),
    Objective(surrogate=SquaredLogRatio(tau=0.5), beta=0.1, kl="k1", temperature=1.4),
]
ADVANTAGES = (1.5, -0.5, 0.75)


def losses_with_past(
    objective: Objective,
    lengths: Sequence[int],
    weights: Tensor,
    *,
    old: Tensor,
    reference: Tensor,
    dtype: torch.dtype = torch.float32,
) -> TokenLosses:
    """Of three responses. weights, old, reference: [R], of the device that is computed on."""
    samples = [
        Sample(problem_id="", sample_index=n, prompt_ids=(0,), response_ids=(0,) * length)
        for n, length in enumerate(lengths)
    ]
    batch = build_microbatch(
        samples, [1.0] * len(lengths), advantages=ADVANTAGES, align=1, device=weights.device
    )
    batch = replace(
        batch,
        weights_R=weights.to(dtype),
        old_log_probs_R=old.to(dtype),
        reference_log_probs_R=reference.to(dtype),
    )
    return token_losses(objective, batch)
