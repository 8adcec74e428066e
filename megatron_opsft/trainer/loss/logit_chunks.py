"""Operations of the loss on a chunk of logits: statistics and gradient, and the same for the
divergence from a teacher's logits.

This is the PyTorch version, used on CPUs; `logit_kernels` has the Triton version. No operation
communicates: a rank's results cover its own columns. Call them outside of autograd.

Shapes: C response tokens of a chunk, V columns of the vocabulary (this tensor-parallel rank's), G a
group of the C rows. C and V may be 0. Labels are int64 indices into the rank's columns: a label
that is negative or at least V lies on another rank.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Logits in a group of rows that is worked on at a time: it and the scratch buffer, 4 MiB each, stay
# in a CPU's cache through all passes over them.
_GROUP = 2**20
_LARGEST = torch.finfo(torch.float32).max


class RowStatistics(NamedTuple):
    """Statistics of each row of logits, float32 [C]."""

    lse_C: Tensor
    """Log-sum-exp."""
    target_C: Tensor
    """The label's logit; 0 if it lies on another rank."""
    mean_C: Tensor | None
    """Mean of the logits under the row's softmax; None unless requested."""


def row_statistics(
    logits_CV: Tensor, labels_C: Tensor, *, mean: bool = False
) -> RowStatistics:
    """Return the statistics of each row; mean: compute `mean_C` too.

    logits_CV: float32, left unchanged; without columns the results are -inf, 0 and 0. Logits that
    are not finite give the same results as torch.logsumexp and softmax.
    """
    lse_C = logits_CV.new_full(labels_C.shape, -torch.inf)
    target_C = torch.zeros_like(lse_C)
    mean_C = torch.zeros_like(lse_C) if mean else None
    if not logits_CV.numel():
        return RowStatistics(lse_C, target_C, mean_C)
    inside_C, columns_C = _locate(labels_C, logits_CV.shape[1])
    target_C = torch.where(inside_C, logits_CV.gather(1, columns_C[:, None])[:, 0], 0.0)
    groups = list(_groups(logits_CV))
    scratch = torch.empty_like(logits_CV[groups[0]])  # no group is larger
    for rows in groups:
        logits_GV = logits_CV[rows]
        # Not +-inf: inf - inf is nan.
        max_G = logits_GV.amax(1).clamp_(-_LARGEST, _LARGEST)
        exp_GV = scratch[: len(logits_GV)]
        torch.sub(logits_GV, max_G[:, None], out=exp_GV).exp_()
        sum_G = exp_GV.sum(1)
        lse_C[rows] = sum_G.log() + max_G
        if mean_C is not None:
            mean_C[rows] = exp_GV.mul_(logits_GV).sum(1) / sum_G
    return RowStatistics(lse_C, target_C, mean_C)


def loss_gradient_(
    logits_CV: Tensor,
    labels_C: Tensor,
    lse_C: Tensor,
    weights_C: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return d(sum_c weight_c * (lse_c - target_c)) / d logits = (exp(logits - lse) - onehot) *
    weight.

    lse_C: over all columns of all ranks. With out_dtype float32 the logits are overwritten and
    returned; with bfloat16 a new tensor is returned and the content of the logits is undefined.
    Rows of weight 0 become exact zeros, whatever their logits.
    """
    inside_C, columns_C = _locate(labels_C, logits_CV.shape[1])
    for rows in _groups(logits_CV):
        grad_GV = logits_CV[rows]
        grad_GV.sub_(lse_C[rows, None]).exp_()
        label_G1 = columns_C[rows, None]
        onehot_G1 = inside_C[rows, None].float()
        grad_GV.scatter_(1, label_G1, grad_GV.gather(1, label_G1) - onehot_G1)
        grad_GV.mul_(weights_C[rows, None])
    logits_CV.index_fill_(0, (weights_C == 0).nonzero()[:, 0], 0.0)
    return logits_CV.to(out_dtype)


def divergences(
    logits_CV: Tensor,
    teacher_CV: Tensor,
    lse_C: Tensor,
    teacher_lse_C: Tensor,
    *,
    forward: bool,
) -> Tensor:
    """Return this rank's columns' terms of KL(p || q), or of KL(q || p) if forward; float32 [C].

    p: softmax of the logits; q: of the teacher's logits. Both log-sum-exps are over all columns of
    all ranks.
    """
    sums_C = torch.zeros_like(lse_C)
    for rows in _groups(logits_CV):
        log_p_GV = logits_CV[rows] - lse_C[rows, None]
        log_q_GV = teacher_CV[rows] - teacher_lse_C[rows, None]
        if forward:
            log_p_GV, log_q_GV = log_q_GV, log_p_GV
        difference_GV = torch.sub(log_p_GV, log_q_GV, out=log_q_GV)
        sums_C[rows] = difference_GV.mul_(log_p_GV.exp_()).sum(1)
    return sums_C


def distillation_gradient_(
    logits_CV: Tensor,
    teacher_CV: Tensor,
    labels_C: Tensor,
    lse_C: Tensor,
    teacher_lse_C: Tensor,
    divergence_C: Tensor,
    weights_C: Tensor,
    teacher_weights_C: Tensor,
    out_dtype: torch.dtype,
    *,
    forward: bool,
) -> Tensor:
    """Return `loss_gradient_` plus, for each row, its teacher weight times the gradient of the
    divergence between the model's distribution p and the teacher's q.

    The gradient of KL(p || q) is p (log p - log q - KL); with `forward` it is that of KL(q || p),
    p - q. No gradient reaches the teacher. divergence_C: KL(p || q) of each row over the whole
    vocabulary, not used if forward. Both logits are overwritten. Rows whose two weights are both 0
    become exact zeros.
    """
    for rows in _groups(logits_CV):
        log_p_GV = logits_CV[rows] - lse_C[rows, None]
        teacher_GV = teacher_CV[rows].sub_(teacher_lse_C[rows, None])
        if forward:
            torch.sub(log_p_GV.exp_(), teacher_GV.exp_(), out=teacher_GV)
        else:
            torch.sub(log_p_GV, teacher_GV, out=teacher_GV)
            teacher_GV.sub_(divergence_C[rows, None])
            teacher_GV.mul_(log_p_GV.exp_())
        teacher_GV.mul_(teacher_weights_C[rows, None])
    grad_CV = loss_gradient_(logits_CV, labels_C, lse_C, weights_C, logits_CV.dtype)
    teacher_CV.index_fill_(0, (teacher_weights_C == 0).nonzero()[:, 0], 0.0)
    return grad_CV.add_(teacher_CV).to(out_dtype)


def _locate(labels_C: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return if each label is a column of the chunk, and that column; any column if it is not."""
    inside_C = (labels_C >= 0) & (labels_C < num_columns)
    return inside_C, labels_C.clamp(0, num_columns - 1)


def _groups(logits_CV: Tensor) -> Iterator[slice]:
    """Yield the groups of rows; none if there are no logits."""
    if logits_CV.numel():
        step = max(1, _GROUP // logits_CV.shape[1])
        for start in range(0, len(logits_CV), step):
            yield slice(start, start + step)
