"""The Triton kernels of the fused loss, compiled as they are launched, for GPUs that are absent."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_kernels import compiled, too_much

# Two programs of 16 warps share the 65,536 registers of a multiprocessor.
MAX_REGISTERS = 64
# R1-1.5B whole and on 8 ranks, no multiple of 16, and what Triton takes for a constant.
COLUMNS = [151_936, 18_992, 5_003, 1]


def launch_all() -> None:
    """Every variant that the losses launch (`fused_linear`)."""
    from megatron_opsft.loss import logit_kernels

    labels, row = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    rows = (row,) * 5  # two log-sum-exps, divergences, two weights
    for num_columns in COLUMNS:
        logits = torch.zeros(2, num_columns)
        logit_kernels.row_statistics(logits, labels)
        logit_kernels.row_statistics(logits, labels, mean=True)  # entropy
        for dtype in (torch.float32, torch.bfloat16):
            logit_kernels.loss_gradient_(logits, labels, row, row, dtype)
            for way in (False, True):
                logit_kernels.distillation_gradient_(
                    logits, logits, labels, *rows, dtype, forward=way
                )
        logit_kernels.divergences(logits, logits, row, row, forward=False)


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_compile_without_spills(tmp_path: Path, architecture: int) -> None:
    kernels = compiled(architecture, launch_all, tmp_path)
    assert len(kernels) == 9 * 3  # two of the sizes are multiples of 16
    assert {kernel.name for kernel in kernels} == {
        "_row_statistics_kernel",
        "_loss_gradient_kernel",
        "_divergence_kernel",
        "_distillation_gradient_kernel",
    }
    assert too_much(kernels, max_registers=MAX_REGISTERS) == []


def launch_too_wide() -> None:
    """A row in one warp: each thread would need more registers than it can have."""
    from megatron_opsft.loss import logit_kernels

    logits, labels = torch.zeros(2, 151_936), torch.zeros(2, dtype=torch.int64)
    kernel: Any = logit_kernels._row_statistics_kernel
    row = torch.zeros(2)
    given = (logits, 151_936, labels, row, row, row, 151_936)
    kernel[(2,)](*given, WITH_MEAN=True, BLOCK=8192, num_warps=1)


def test_a_kernel_that_spills_is_seen(tmp_path: Path) -> None:
    (kernel,) = compiled(90, launch_too_wide, tmp_path)
    assert kernel.spilled_bytes > 0
    assert too_much([kernel], max_registers=255) == [kernel]
