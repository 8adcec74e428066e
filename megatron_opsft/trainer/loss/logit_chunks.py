"""What the loss needs of a chunk of logits, in two operations that read every logit once each, and
two more for the divergence from a teacher's logits.

The PyTorch version, used on CPUs; `logit_kernels` has the Triton version. None communicates: a
rank's statistics are of its own columns.

Shapes: C response tokens of a chunk, V columns of the vocabulary (this tensor-parallel rank's), G
of the C rows. C and V may be 0. Labels are int64 and count columns of the rank: one that is
negative or at least V lies on another rank. Call them outside of autograd.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of the rows worked on at a time: they and the scratch buffer, 4 MiB each, stay in a CPU's
# cache through all the passes over them.
_GROUP = 2**20
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """For each row, float32 [C]: log-sum-exp, the label's logit (0 if it lies elsewhere), and the
    mean of the logits under the row's softmax; mean_C: None where it was not asked for.
    """

    lse_C: Tensor
    target_C: Tensor
    mean_C: Tensor | None


def row_statistics(
    logits_CV: Tensor, labels_C: Tensor, *, mean: bool = False
) -> RowStatistics:
    """Statistics of each row; mean: whether `mean_C` is wanted.

    logits_CV: float32, left unchanged. Of no columns: -inf, 0 and 0. What is not finite shows as in
    torch.logsumexp and softmax.
    """
    lse_C = logits_CV.new_full(labels_C.shape, -torch.inf)
    target_C = torch.zeros_like(lse_C)
    mean_C = torch.zeros_like(lse_C) if mean else None
    if not logits_CV.numel():
        return RowStatistics(lse_C=lse_C, target_C=target_C, mean_C=mean_C)
    inside_C, columns_C = _locate(labels_C, logits_CV.shape[1])
    target_C = torch.where(inside_C, logits_CV.gather(1, columns_C[:, None])[:, 0], 0.0)
    scratch = _scratch(logits_CV)
    for rows in _groups(logits_CV):
        logits_GV = logits_CV[rows]
        # Not +-inf: inf - inf is nan.
        max_G = logits_GV.amax(1).clamp_(-_LARGEST, _LARGEST)
        exp_GV = torch.sub(
            logits_GV, max_G[:, None], out=scratch[: len(logits_GV)]
        ).exp_()
        sum_G = exp_GV.sum(1)
        lse_C[rows] = sum_G.log() + max_G
        if mean_C is not None:
            mean_C[rows] = exp_GV.mul_(logits_GV).sum(1) / sum_G
    return RowStatistics(lse_C=lse_C, target_C=target_C, mean_C=mean_C)


def loss_gradient_(
    logits_CV: Tensor,
    labels_C: Tensor,
    lse_C: Tensor,
    weights_C: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """d(sum_c weight_c * (lse_c - target_c)) / d logits = (exp(logits - lse) - onehot) * weight.

    lse_C: over all columns of all ranks. float32: overwrites the logits and returns them; bfloat16:
    returns a new tensor, and the logits' content is undefined. Rows of weight 0 are exact zeros,
    whatever their logits.
    """
    in_place = out_dtype == logits_CV.dtype
    out_CV = logits_CV if in_place else torch.empty_like(logits_CV, dtype=out_dtype)
    if not logits_CV.numel():
        return out_CV
    inside_C, columns_C = _locate(labels_C, logits_CV.shape[1])
    scratch = None if in_place else _scratch(logits_CV)
    for rows in _groups(logits_CV):
        logits_GV = logits_CV[rows]
        grad_GV = logits_GV if scratch is None else scratch[: len(logits_GV)]
        torch.sub(logits_GV, lse_C[rows, None], out=grad_GV).exp_()
        at_G1 = columns_C[rows, None]
        grad_GV.scatter_(
            1, at_G1, grad_GV.gather(1, at_G1) - inside_C[rows, None].float()
        )
        torch.mul(grad_GV, weights_C[rows, None], out=grad_GV)
        if not in_place:
            out_CV[rows] = grad_GV
    return out_CV.index_fill_(0, (weights_C == 0).nonzero()[:, 0], 0.0)


def divergences(
    logits_CV: Tensor,
    teacher_CV: Tensor,
    lse_C: Tensor,
    teacher_lse_C: Tensor,
    *,
    forward: bool,
) -> Tensor:
    """What these columns add to KL(p || q), float32 [C], or to KL(q || p) if forward; p the softmax
    of the logits, q that of the teacher's. Both log-sum-exps are over all columns of all ranks.
    """
    sums_C = torch.zeros_like(lse_C)
    for rows in _groups(logits_CV) if logits_CV.numel() else ():
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
    """`loss_gradient_` with the weights, and teacher_weight_c times the gradient of the divergence:
    p (log p - log q - KL), or p - q if forward. No gradient reaches the teacher.

    divergence_C: over all columns of all ranks. The teacher's logits are undefined afterwards; rows
    of which both weights are 0 are exact zeros.
    """
    for rows in _groups(logits_CV) if logits_CV.numel() else ():
        log_p_GV = logits_CV[rows] - lse_C[rows, None]
        teacher_GV = teacher_CV[rows].sub_(teacher_lse_C[rows, None])
        if forward:
            torch.sub(log_p_GV.exp_(), teacher_GV.exp_(), out=teacher_GV)
        else:
            torch.sub(log_p_GV, teacher_GV, out=teacher_GV).sub_(
                divergence_C[rows, None]
            )
            teacher_GV.mul_(log_p_GV.exp_())
        teacher_GV.mul_(teacher_weights_C[rows, None])
    grad_CV = loss_gradient_(logits_CV, labels_C, lse_C, weights_C, logits_CV.dtype)
    teacher_CV.index_fill_(0, (teacher_weights_C == 0).nonzero()[:, 0], 0.0)
    return grad_CV.add_(teacher_CV).to(out_dtype)


def _locate(labels_C: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Whether each label is a column of the chunk, and that column (any column if not)."""
    return (labels_C >= 0) & (labels_C < num_columns), labels_C.clamp(
        0, num_columns - 1
    )


def _group_rows(logits_CV: Tensor) -> int:
    return max(1, min(_GROUP // logits_CV.shape[1], len(logits_CV)))


def _groups(logits_CV: Tensor) -> Iterator[slice]:
    step = _group_rows(logits_CV)
    return (slice(start, start + step) for start in range(0, len(logits_CV), step))


def _scratch(logits_CV: Tensor) -> Tensor:
    return logits_CV.new_empty(_group_rows(logits_CV), logits_CV.shape[1])
