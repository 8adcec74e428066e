"""Token losses of a micro-batch from the hidden states of the last layer, computed in one of two
ways.

| `train.cross_entropy` | logits of the response tokens |                            |
|-----------------------|-------------------------------|----------------------------|
| `te`                  | all, model's dtype            | TransformerEngine's kernel |
| `fused_linear`        | a chunk at a time, float32    | `fused_linear.py`          |

Neither computes logits of prompts or padding tokens. Megatron's own losses are not offered: one
keeps all logits in float32 too, the other rounds every gradient to bfloat16. Columns that only pad
the vocabulary get no probability and no gradient, so the loss equals that of the unpadded Hugging
Face model.
"""

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from torch import Tensor

from megatron_opsft.runtime.device import Device, transformer_engine_version
from megatron_opsft.trainer.loss.fused_linear import (
    TokenStatistics,
    fused_linear_loss,
)
from megatron_opsft.trainer.loss.loss_memory import CrossEntropyKind
from megatron_opsft.trainer.loss.output_head import OutputHead, Teacher
from megatron_opsft.trainer.loss.token_losses import TokenLosses

# Earlier versions round intermediate gradients to the logits' dtype, which made trainings diverge
# (Megatron-LM pull requests 5115 and 7339).
_TE_WITH_EXACT_CROSS_ENTROPY = (2, 20)


def te_problem(device: Device, dtype: str) -> str:
    """Return why this run cannot use TransformerEngine's cross-entropy; "" if it can."""
    if not device.is_cuda:
        return "TransformerEngine needs CUDA"
    version = transformer_engine_version(device)
    if version is None:
        return "TransformerEngine cannot be imported"
    if version < _TE_WITH_EXACT_CROSS_ENTROPY:
        return f"TransformerEngine is {version[0]}.{version[1]}, before 2.20"
    if dtype != "bfloat16":
        return f"the model computes in {dtype}"
    return ""


def summed_loss(
    kind: CrossEntropyKind,
    hidden_TH: Tensor,
    head: OutputHead,
    positions_R: Tensor,
    labels_R: Tensor,
    losses: TokenLosses,
    *,
    teacher: Teacher | None = None,
    accumulation_fusion: bool = False,
) -> tuple[Tensor, TokenStatistics]:
    """Return the sum of the token losses, float32 [], and the statistics of the tokens, without
    entropies; parameters as for `fused_linear_loss`, which computes every loss with a teacher.

    accumulation_fusion: with `te`, Apex adds the weight's gradient to its `main_grad`.
    """
    if kind == "fused_linear" or teacher is not None:
        return fused_linear_loss(
            hidden_TH, head, positions_R, labels_R, losses, teacher=teacher
        )
    linear: Callable[..., Tensor] = linear_with_grad_accumulation_and_async_allreduce
    if not head.weight_VH.requires_grad:
        linear = linear_with_frozen_weight
    logits_1RV = linear(
        hidden_TH[positions_R][None],
        head.weight_VH,
        None,
        gradient_accumulation_fusion=accumulation_fusion,
        allreduce_dgrad=False,  # `whole_hidden` sums the ranks' gradients
        sequence_parallel=False,
        tp_group=head.group,
    )
    log_probs_R = -losses_of_logits(logits_1RV, labels_R[None], head)[0]
    return losses(log_probs_R).sum(), TokenStatistics(log_probs_R.detach())


def losses_of_logits(logits_1RV: Tensor, labels_1R: Tensor, head: OutputHead) -> Tensor:
    """Return -log p(label) of each position, float32 [1, R]. Overwrites the logits. Called by all
    ranks of the tensor-parallel group, with equal results.
    """
    if not labels_1R.numel():  # TransformerEngine's kernel fails without labels
        return logits_1RV.sum(-1, dtype=torch.float32)
    if head.temperature != 1.0:
        logits_1RV.div_(head.temperature)
    if head.num_rows < logits_1RV.shape[-1]:
        # Not -inf: a rank whose columns are all padding would compute inf - inf.
        logits_1RV[..., head.num_rows :] = torch.finfo(logits_1RV.dtype).min
    # Not Megatron's wrapper: it keeps a second copy of the logits for the backward pass.
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    return parallel_cross_entropy(
        logits_1RV, labels_1R, dist_process_group=head.group, overwrite_input=True
    )
