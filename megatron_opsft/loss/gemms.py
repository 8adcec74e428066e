"""GEMMs with float32 results, whatever the dtype of the factors.

A GEMM of bfloat16 matrices that is rounded to bfloat16 loses what a softmax needs. CUDA's can
return their float32 accumulators; a CPU's cannot, so there the factors are converted, a block of
the second one at a time, so that no second copy of an output weight appears.
"""

import torch
from torch import Tensor

BLOCK_ROWS = 8192


def times_transposed(left_CH: Tensor, right_VH: Tensor) -> Tensor:
    """left @ right.T, float32 [C, V]; both factors in one dtype."""
    if left_CH.dtype == torch.float32:
        return left_CH @ right_VH.T
    if left_CH.is_cuda:
        return torch.mm(left_CH, right_VH.T, out_dtype=torch.float32)
    out_CV = left_CH.new_empty(len(left_CH), len(right_VH), dtype=torch.float32)
    left_CH = left_CH.float()
    for first in range(0, len(right_VH), BLOCK_ROWS):
        part = slice(first, first + BLOCK_ROWS)
        out_CV[:, part] = left_CH @ right_VH[part].float().T
    return out_CV


def add_product_(out_CH: Tensor, left_CV: Tensor, right_VH: Tensor) -> None:
    """out += left @ right; out float32 [C, H]. On a CPU `left` may be float32 and `right` not."""
    if left_CV.is_cuda and left_CV.dtype != torch.float32:
        torch.addmm(out_CH, left_CV, right_VH, out_dtype=torch.float32, out=out_CH)
        return
    for first in range(0, len(right_VH), BLOCK_ROWS):
        part = slice(first, first + BLOCK_ROWS)
        out_CH.addmm_(left_CV[:, part].float(), right_VH[part].float())


def add_outer_(out_VH: Tensor, left_CV: Tensor, right_CH: Tensor) -> None:
    """out += left.T @ right; out float32 [V, H]. On a CPU `left` may be float32 and `right` not."""
    if left_CV.is_cuda and left_CV.dtype != torch.float32:
        torch.addmm(out_VH, left_CV.T, right_CH, out_dtype=torch.float32, out=out_VH)
    else:
        out_VH.addmm_(left_CV.T.float(), right_CH.float())
