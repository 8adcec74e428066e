"""Hashes of a model's files: a run that is resumed after a month must find the same model."""

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_opsft.models.storage.hf_files import HfTensors
from megatron_opsft.models.storage.model_paths import (
    ADAPTER_NAME,
    ADAPTER_WEIGHTS,
    CARRIED_NAME,
    has_hf_weights,
)

_THREADS = 8
FileHashes = dict[str, list[Any]]
"""File name -> [its size in bytes, the time of its last change in nanoseconds, its SHA-256]."""


def hash_model_files(model_dir: Path, known: Mapping[str, Any]) -> FileHashes:
    """Hash config.json and the files with the weights.

    known: result of an earlier call. Its hash of a file is taken if size and time are still the
    same; of all other files, every byte is read.
    Errors: `OSError`; `UserError` for weights that are not complete.
    """
    files = sorted(_files_of(model_dir))
    names = [file.name for file in files]
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = pool.map(_hash_file, files, map(known.get, names))
        return dict(zip(names, hashes, strict=True))


def hash_adapter_files(adapter_dir: Path) -> FileHashes:
    """Hash the weights of a LoRA adapter: a directory of PEFT's, or a checkpoint. Errors:
    `OSError`.
    """
    files = sorted(adapter_dir.glob("*.distcp")) or [adapter_dir / ADAPTER_WEIGHTS]
    return {file.name: _hash_file(file, None) for file in files}


def _files_of(model_dir: Path) -> Iterator[Path]:
    """Yield config.json, if there is one, and the files with the weights."""
    if (model_dir / "config.json").is_file():
        yield model_dir / "config.json"
    if has_hf_weights(model_dir):
        yield from HfTensors(model_dir).files()
    else:
        yield from model_dir.glob("*.distcp")  # a checkpoint of Megatron
        yield from model_dir.glob(CARRIED_NAME)
        if (model_dir / ADAPTER_NAME).is_file():  # of a LoRA adapter
            yield model_dir / ADAPTER_NAME


def _hash_file(file: Path, known: Any) -> list[Any]:
    """Return the entry of a file in `FileHashes`. known: its entry in an earlier result, if any."""
    status = file.stat()
    size_and_time = [status.st_size, status.st_mtime_ns]
    if isinstance(known, list) and known[:2] == size_and_time and len(known) == 3:
        return known
    with file.open("rb") as opened:
        return [*size_and_time, hashlib.file_digest(opened, "sha256").hexdigest()]


def combined(hashes: FileHashes) -> str:
    """Return one hash of all names and contents; directory and time of change do not matter."""
    lines = [f"{name} {sha256}\n" for name, (_, _, sha256) in sorted(hashes.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tokenizer_sha256(model_dir: Path, tokenizer: Any) -> str:
    """Return a hash of the vocabulary and the chat template."""
    file = model_dir / "tokenizer.json"
    if file.is_file():
        content = file.read_bytes()
    else:
        content = repr(sorted(tokenizer.get_vocab().items())).encode()
    return hashlib.sha256(content + str(tokenizer.chat_template).encode()).hexdigest()
