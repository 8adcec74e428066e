"""The operations of `logit_chunks` in Triton, with the same contracts.

Only imported (by `fused_linear.operations`) on a CUDA device with Triton; with TRITON_INTERPRET=1
the kernels also run on CPU tensors. Each kernel reads every logit once, and none needs a buffer of
the chunk's size. The columns of a row are contiguous in memory; rows may have gaps between them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from megatron_opsft.trainer.loss.logit_chunks import RowStatistics

# A thread loads 8 float32 of a matrix, as two 16-byte loads, and needs fewer than 64 registers (see
# tests/gpu_contract): so two or more programs share a multiprocessor and hide each other's waits
# for memory.
_ROW_BLOCK, _ROW_WARPS = 4096, 16
_GRADIENT_BLOCK, _GRADIENT_WARPS = 2048, 8
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


def row_statistics(
    logits_CV: Tensor, labels_C: Tensor, *, mean: bool = False
) -> RowStatistics:
    """See `logit_chunks.row_statistics`."""
    num_rows, num_columns = logits_CV.shape
    lse_C = logits_CV.new_full((num_rows,), -torch.inf)
    target_C = torch.zeros_like(lse_C)
    mean_C = torch.zeros_like(lse_C) if mean else None
    # The kernel wants a pointer even if it writes no mean.
    mean_out_C = lse_C if mean_C is None else mean_C
    if logits_CV.numel():
        _row_statistics_kernel[(num_rows,)](
            logits_CV,
            _rows_of(logits_CV),
            labels_C.contiguous(),
            lse_C,
            target_C,
            mean_out_C,
            num_columns,
            WITH_MEAN=mean,
            BLOCK=_ROW_BLOCK,
            num_warps=_ROW_WARPS,
        )
    return RowStatistics(lse_C, target_C, mean_C)


def loss_gradient_(
    logits_CV: Tensor,
    labels_C: Tensor,
    lse_C: Tensor,
    weights_C: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the loss with respect to the logits, in one kernel; it may overwrite
    them. Arguments and result are those of `logit_chunks.loss_gradient_`, its oracle in PyTorch.
    """
    num_rows, num_columns = logits_CV.shape
    out_CV = logits_CV
    if out_dtype != logits_CV.dtype:
        out_CV = torch.empty_like(logits_CV, dtype=out_dtype)
    if logits_CV.numel():
        _loss_gradient_kernel[(num_rows, triton.cdiv(num_columns, _GRADIENT_BLOCK))](
            logits_CV,
            _rows_of(logits_CV),
            labels_C.contiguous(),
            lse_C.contiguous(),
            weights_C.contiguous(),
            out_CV,
            _rows_of(out_CV),
            num_columns,
            BLOCK=_GRADIENT_BLOCK,
            num_warps=_GRADIENT_WARPS,
        )
    return out_CV


def divergences(
    logits_CV: Tensor,
    teacher_CV: Tensor,
    lse_C: Tensor,
    teacher_lse_C: Tensor,
    *,
    forward: bool,
) -> Tensor:
    """See `logit_chunks.divergences`."""
    sums_C = torch.zeros_like(lse_C)
    if logits_CV.numel():
        student = logits_CV, _rows_of(logits_CV), lse_C.contiguous()
        teacher = teacher_CV, _rows_of(teacher_CV), teacher_lse_C.contiguous()
        drawn, compared = (teacher, student) if forward else (student, teacher)
        _divergence_kernel[(len(logits_CV),)](
            *drawn,
            *compared,
            sums_C,
            logits_CV.shape[1],
            BLOCK=_ROW_BLOCK,
            num_warps=_ROW_WARPS,
        )
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
    """See `logit_chunks.distillation_gradient_`."""
    num_rows, num_columns = logits_CV.shape
    out_CV = logits_CV
    if out_dtype != logits_CV.dtype:
        out_CV = torch.empty_like(logits_CV, dtype=out_dtype)
    if logits_CV.numel():
        _distillation_gradient_kernel[
            (num_rows, triton.cdiv(num_columns, _GRADIENT_BLOCK))
        ](
            logits_CV,
            _rows_of(logits_CV),
            teacher_CV,
            _rows_of(teacher_CV),
            labels_C.contiguous(),
            lse_C.contiguous(),
            teacher_lse_C.contiguous(),
            divergence_C.contiguous(),
            weights_C.contiguous(),
            teacher_weights_C.contiguous(),
            out_CV,
            _rows_of(out_CV),
            num_columns,
            FORWARD=forward,
            BLOCK=_GRADIENT_BLOCK,
            num_warps=_GRADIENT_WARPS,
        )
    return out_CV


def _rows_of(matrix: Tensor) -> int:
    """Return the number of elements from one row to the next."""
    assert matrix.stride(1) == 1 or matrix.shape[1] == 1, (
        "the columns of a row must be contiguous"
    )
    return matrix.stride(0)


@triton.jit
def _row_statistics_kernel(
    logits_ptr: tensor,
    logits_stride: tensor,
    labels_ptr: tensor,
    lse_ptr: tensor,
    target_ptr: tensor,
    mean_ptr: tensor,
    num_columns: tensor,
    WITH_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute one row per program. Each of BLOCK lanes keeps the maximum, sum and weighted sum of
    its own columns, so threads exchange values only once, after the loop.

    The maximum stays finite: inf - inf would give nan where PyTorch gives inf.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    lanes = tl.arange(0, BLOCK)
    lane_max = tl.full((BLOCK,), -_LARGEST, tl.float32)
    lane_sum = tl.zeros((BLOCK,), tl.float32)
    lane_weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + lanes
        valid = columns < num_columns
        logits = tl.load(logits_ptr + columns, mask=valid, other=-float("inf"))
        new_max = tl.minimum(tl.maximum(lane_max, logits), _LARGEST)
        rescale = tl.exp(lane_max - new_max)
        added = tl.exp(logits - new_max)
        lane_sum = lane_sum * rescale + added
        if WITH_MEAN:
            valid_logits = tl.where(valid, logits, 0.0)
            lane_weighted = lane_weighted * rescale + added * valid_logits
        lane_max = new_max
    row_max = tl.max(lane_max, axis=0)
    scale = tl.exp(lane_max - row_max)
    row_sum = tl.sum(lane_sum * scale, axis=0)
    tl.store(lse_ptr + row, row_max + tl.log(row_sum))
    if WITH_MEAN:
        tl.store(mean_ptr + row, tl.sum(lane_weighted * scale, axis=0) / row_sum)
    label = tl.load(labels_ptr + row)
    inside = (label >= 0) & (label < num_columns)
    tl.store(target_ptr + row, tl.load(logits_ptr + label, mask=inside, other=0.0))


@triton.jit
def _loss_gradient_kernel(
    logits_ptr: tensor,
    logits_stride: tensor,
    labels_ptr: tensor,
    lse_ptr: tensor,
    weights_ptr: tensor,
    out_ptr: tensor,
    out_stride: tensor,
    num_columns: tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Compute BLOCK columns of a row per program; `out` may be the logits. A row of weight 0 is not
    read.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weights_ptr + row)
    used = columns < tl.where(weight == 0.0, 0, num_columns)
    logits = tl.load(logits_ptr + row * logits_stride + columns, mask=used, other=0.0)
    onehot = tl.where(columns == tl.load(labels_ptr + row), 1.0, 0.0)
    gradient = tl.where(
        used, (tl.exp(logits - tl.load(lse_ptr + row)) - onehot) * weight, 0.0
    )
    out = gradient.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + columns, out, mask=columns < num_columns)


@triton.jit
def _divergence_kernel(
    drawn_ptr: tensor,
    drawn_stride: tensor,
    drawn_lse_ptr: tensor,
    other_ptr: tensor,
    other_stride: tensor,
    other_lse_ptr: tensor,
    sums_ptr: tensor,
    num_columns: tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Compute one row per program: the sum of a (log a - log b), where a is the softmax of the
    `drawn` logits and b that of the `other` logits. Lanes: see `_row_statistics_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    drawn_ptr += row * drawn_stride
    other_ptr += row * other_stride
    drawn_lse = tl.load(drawn_lse_ptr + row)
    other_lse = tl.load(other_lse_ptr + row)
    lanes = tl.arange(0, BLOCK)
    lane_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + lanes
        valid = columns < num_columns
        log_a = tl.load(drawn_ptr + columns, mask=valid, other=0.0) - drawn_lse
        log_b = tl.load(other_ptr + columns, mask=valid, other=0.0) - other_lse
        lane_sum += tl.where(valid, tl.exp(log_a) * (log_a - log_b), 0.0)
    tl.store(sums_ptr + row, tl.sum(lane_sum, axis=0))


@triton.jit
def _distillation_gradient_kernel(
    logits_ptr: tensor,
    logits_stride: tensor,
    teacher_ptr: tensor,
    teacher_stride: tensor,
    labels_ptr: tensor,
    lse_ptr: tensor,
    teacher_lse_ptr: tensor,
    divergence_ptr: tensor,
    weights_ptr: tensor,
    teacher_weights_ptr: tensor,
    out_ptr: tensor,
    out_stride: tensor,
    num_columns: tensor,
    FORWARD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute BLOCK columns of a row per program; `out` may be the logits. A row whose two weights
    are both 0 is not read. If one weight is 0, its term adds exactly 0, whatever the logits.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weights_ptr + row)
    teacher_weight = tl.load(teacher_weights_ptr + row)
    used = columns < tl.where((weight == 0.0) & (teacher_weight == 0.0), 0, num_columns)
    logits = tl.load(logits_ptr + row * logits_stride + columns, mask=used, other=0.0)
    teacher = tl.load(
        teacher_ptr + row * teacher_stride + columns, mask=used, other=0.0
    )
    log_p = logits - tl.load(lse_ptr + row)
    log_q = teacher - tl.load(teacher_lse_ptr + row)
    divergence = tl.load(divergence_ptr + row)
    p = tl.exp(log_p)
    slope = p - tl.exp(log_q) if FORWARD else p * (log_p - log_q - divergence)
    onehot = tl.where(columns == tl.load(labels_ptr + row), 1.0, 0.0)
    gradient = tl.where(weight == 0.0, 0.0, (p - onehot) * weight)
    gradient += tl.where(teacher_weight == 0.0, 0.0, slope * teacher_weight)
    out = tl.where(used, gradient, 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + columns, out, mask=columns < num_columns)
