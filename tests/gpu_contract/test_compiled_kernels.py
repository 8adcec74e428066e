"""The Triton kernels of the fused loss, compiled as they are launched, for GPUs that are absent.

A launch runs up to the point where it would need a device: Triton specialises it by its real
arguments and compiles it down to machine code. What the assembler says of that is the result.
"""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

# Two programs of 16 warps share the 65,536 registers of a multiprocessor.
MAX_REGISTERS = 64
# R1-1.5B whole and on 8 ranks, no multiple of 16, and what Triton takes for a constant.
COLUMNS = [151_936, 18_992, 5_003, 1]
SHARED_BYTES = 227 * 1024  # of a multiprocessor of sm_90 and sm_100, for one program


class NoDriver:
    """What Triton asks of a driver before it launches: which GPU to compile for. It keeps what it
    compiled by device.
    """

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return self._architecture

    def get_current_stream(self, device: int) -> int:
        return 0


def launch_all() -> None:
    """Every variant that the losses launch (`fused_linear`)."""
    from megatron_opsft.trainer.loss import logit_kernels

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
    """A multiprocessor has room for two programs at a time."""
    from triton import knobs
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    found: dict[int, tuple[Any, str]] = {}
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        with redirect_stdout(io.StringIO()) as said:
            kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        found.setdefault(id(kernel), (kernel, said.getvalue()))

    with (
        patch.object(driver, "_active", NoDriver(architecture)),
        patch.object(JITFunction, "run", compile_only),
        knobs.nvidia.scope(),
        knobs.cache.scope(),
    ):
        knobs.cache.dir = str(tmp_path)  # empty: the assembler says nothing of what is there
        knobs.nvidia.dump_ptxas_log = True
        launch_all()
    assert len(found) == 9 * 3  # two of the sizes are multiples of 16
    assert {kernel.metadata.name for kernel, _ in found.values()} == {
        "_row_statistics_kernel",
        "_loss_gradient_kernel",
        "_divergence_kernel",
        "_distillation_gradient_kernel",
    }
    for kernel, said in found.values():
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
        (registers,) = re.findall(r"Used (\d+) registers", said)
        assert int(registers) <= MAX_REGISTERS, kernel.metadata
        assert 2 * kernel.metadata.shared <= SHARED_BYTES, kernel.metadata
