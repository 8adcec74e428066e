"""`logit_chunks.row_statistics` and `loss_gradient_` in Triton, to the same contract.

Only imported (by `fused_linear.operations`) on a CUDA device where Triton is installed; with
TRITON_INTERPRET=1 the kernels also run on CPU tensors. Each reads every logit once; neither holds a
buffer of the chunk's size. The columns of a row lie side by side in memory, rows may be apart.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_opsft.loss.logit_chunks import RowStatistics

# Both: 8 float32 a thread, two 16-byte loads. Under 64 registers (see tests/gpu_contract), so that
# two or more programs share a multiprocessor and hide each other's waits for memory.
_STATISTICS_BLOCK, _STATISTICS_WARPS = 4096, 16
_GRADIENT_BLOCK, _GRADIENT_WARPS = 2048, 8
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


def row_statistics(logits_CV: Tensor, labels_C: Tensor, *, mean: bool = False) -> RowStatistics:
    """See `logit_chunks.row_statistics`."""
    num_rows, num_columns = logits_CV.shape
    lse_C = logits_CV.new_full((num_rows,), -torch.inf)
    target_C = torch.zeros_like(lse_C)
    mean_C = torch.zeros_like(lse_C) if mean else None
    if logits_CV.numel():
        _row_statistics_kernel[(num_rows,)](
            logits_CV,
            _rows_of(logits_CV),
            labels_C.contiguous(),
            lse_C,
            target_C,
            lse_C if mean_C is None else mean_C,
            num_columns,
            WITH_MEAN=mean,
            BLOCK=_STATISTICS_BLOCK,
            num_warps=_STATISTICS_WARPS,
        )
    return RowStatistics(lse_C=lse_C, target_C=target_C, mean_C=mean_C)


def loss_gradient_(
    logits_CV: Tensor,
    labels_C: Tensor,
    lse_C: Tensor,
    weights_C: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `logit_chunks.loss_gradient_`."""
    num_rows, num_columns = logits_CV.shape
    in_place = out_dtype == logits_CV.dtype
    out_CV = logits_CV if in_place else torch.empty_like(logits_CV, dtype=out_dtype)
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


def _rows_of(matrix: Tensor) -> int:
    """Elements from one row to the next."""
    assert matrix.stride(1) == 1 or matrix.shape[1] == 1, "the columns of a row must be contiguous"
    return matrix.stride(0)


@triton.jit
def _row_statistics_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    labels_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    target_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    num_columns: tl.tensor,
    WITH_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row. Each of BLOCK lanes keeps the maximum, sum and weighted sum of its own
    columns, so that threads meet only once, behind the loop.

    The maximum stays finite: inf - inf would make a nan of what PyTorch calls inf.
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
        kept = tl.exp(lane_max - new_max)
        added = tl.exp(logits - new_max)
        lane_sum = lane_sum * kept + added
        if WITH_MEAN:
            lane_weighted = lane_weighted * kept + added * tl.where(valid, logits, 0.0)
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
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    labels_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_stride: tl.tensor,
    num_columns: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program for BLOCK columns of a row; out may be the logits. Does not read a row of weight
    0.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weights_ptr + row)
    used = columns < tl.where(weight == 0.0, 0, num_columns)
    logits = tl.load(logits_ptr + row * logits_stride + columns, mask=used, other=0.0)
    onehot = tl.where(columns == tl.load(labels_ptr + row), 1.0, 0.0)
    gradient = tl.where(used, (tl.exp(logits - tl.load(lse_ptr + row)) - onehot) * weight, 0.0)
    out = gradient.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + columns, out, mask=columns < num_columns)
