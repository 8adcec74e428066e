"""Loading the large libraries, PyTorch, Megatron-Core and transformers, in two thirds of the time.

Nothing here imports one of them before it is asked to.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_opsft.runtime.heartbeat import announce


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """For imports: nearly all that they make stays, and Python's garbage collector would go through
    it a hundred times over. It counts as old afterwards, as if the collector had seen it.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # to the oldest generation
        if is_on:
            gc.enable()


@contextmanager
def loading_libraries() -> Iterator[None]:
    """For the imports of a command that trains or evaluates, which it announces on rank 0."""
    announce("loading libraries: PyTorch, Megatron-Core, transformers")
    with collector_at_rest():
        _leave_fusions_plain()
        yield


def _leave_fusions_plain() -> None:
    """Keep Megatron-Core from loading PyTorch's compiler, in a PyTorch that knows no GPUs.

    Megatron hands its fusions to `torch.compile` as they are imported; on a CPU nothing calls them.
    What `megatron.core.jit.disable_jit_fuser` does, which cannot be reached before that import.
    """
    import torch

    if torch.backends.cuda.is_built():
        return
    library: Any = torch
    compiles = torch.compile
    library.compile = lambda function: function
    try:
        import megatron.core.jit  # noqa: F401
    finally:
        library.compile = compiles
