"""Triton kernels compiled for a GPU that is not there, as the project's own launches ask for them.

A launch runs up to the point where it would need a device: Triton specialises it by its real
arguments and compiles it down to machine code. What the assembler says of that is the result.
"""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

SHARED_BYTES = {90: 227 * 1024, 100: 227 * 1024}  # of a multiprocessor, for one program
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """variant: what Triton specialised it for. registers: of a thread; spilled_bytes: stored to
    memory by a thread because registers ran out; shared_bytes: of a program.
    """

    name: str
    variant: str
    architecture: int
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int

    def __str__(self) -> str:
        return (
            f"sm_{self.architecture} {self.name}({self.variant}): {self.warps} warps, "
            f"{self.registers} registers, {self.spilled_bytes} bytes spilled, "
            f"{self.shared_bytes} bytes of shared memory"
        )


_numbers = count()


class _NoDriver:
    """What Triton asks of a driver before it launches: which GPU to compile for."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture
        self._number = next(_numbers)  # Triton keeps what it compiled by device

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(architecture: int, cache: Path) -> Iterator[list[CompiledKernel]]:
    """Inside, a launch of a Triton kernel compiles it and does no more; the list grows with every
    variant.

    cache: an empty folder, for the assembler says nothing of what it need not do again.
    """
    from triton import knobs
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    found: list[CompiledKernel] = []
    known: list[Any] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        with redirect_stdout(io.StringIO()) as said:
            kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel not in known:
            known.append(kernel)
            found.append(_described(kernel, said.getvalue(), architecture))

    with (
        patch.object(driver, "_active", _NoDriver(architecture)),
        patch.object(JITFunction, "run", compile_only),
        knobs.nvidia.scope(),
        knobs.cache.scope(),
    ):
        knobs.cache.dir = str(cache)
        knobs.nvidia.dump_ptxas_log = True
        yield found


def _described(kernel: Any, said: str, architecture: int) -> CompiledKernel:
    registers, spills = _REGISTERS.search(said), _SPILLS.search(said)
    assert registers and spills, f"the assembler did not say what {kernel.metadata.name} takes"
    return CompiledKernel(
        name=kernel.metadata.name,
        variant=_variant(kernel.src),
        architecture=architecture,
        warps=kernel.metadata.num_warps,
        registers=int(registers[1]),
        spilled_bytes=max(int(spills[number]) for number in (1, 2, 3)),
        shared_bytes=kernel.metadata.shared,
    )


def _variant(source: Any) -> str:
    """Types of the arguments, /16 where all values are multiples of 16; values of constants."""
    names = list(source.signature)
    multiples = {path[0] for path, marks in source.attrs.items() if marks}
    parts = [
        f"{kind}{'/16' * (number in multiples)}"
        for number, kind in enumerate(source.signature.values())
        if kind != "constexpr"
    ]
    return ", ".join(parts + [f"{names[p[0]]}={v}" for p, v in source.constants.items()])


def compiled(architecture: int, launch: Callable[[], object], cache: Path) -> list[CompiledKernel]:
    """What the launches in a function compile to."""
    with compiling_for(architecture, cache) as kernels:
        launch()
    return kernels


def too_much(kernels: list[CompiledKernel], *, max_registers: int) -> list[str]:
    """Those that spill, or take more than a multiprocessor has for two programs at a time."""
    return [
        str(kernel)
        for kernel in kernels
        if kernel.spilled_bytes
        or kernel.registers > max_registers
        or 2 * kernel.shared_bytes > SHARED_BYTES[kernel.architecture]
    ]
