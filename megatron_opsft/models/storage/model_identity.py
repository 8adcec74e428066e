"""What a model's directory holds, as hashes: a run that is resumed after a month must find what it
began with.
"""

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_opsft.models.storage.hf_files import HfTensors
from megatron_opsft.models.storage.model_paths import INDEX_NAME, SINGLE_NAME

_THREADS = 8
# File name -> its size in bytes, when it was changed (in nanoseconds), and its SHA-256.
FileHashes = dict[str, list[Any]]


def hash_model_files(model_dir: Path, known: Mapping[str, Any]) -> FileHashes:
    """config.json and the files with the weights. known: what an earlier call returned, whose
    hashes are taken where size and time are the same; of other files, every byte is read.

    Errors: `OSError`; `UserError` for weights that are not whole.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        files = sorted(_files_of(model_dir))
        found = pool.map(lambda file: _hash_file(file, known.get(file.name)), files)
        return dict(zip([file.name for file in files], found, strict=True))


def _files_of(model_dir: Path) -> Iterator[Path]:
    if (model_dir / "config.json").is_file():
        yield model_dir / "config.json"
    if (model_dir / SINGLE_NAME).is_file() or (model_dir / INDEX_NAME).is_file():
        yield from HfTensors(model_dir).files()
    else:
        yield from model_dir.glob("*.distcp")  # a checkpoint of Megatron


def _hash_file(file: Path, known: Any) -> list[Any]:
    status = file.stat()
    size_and_time = [status.st_size, status.st_mtime_ns]
    if isinstance(known, list) and known[:2] == size_and_time and len(known) == 3:
        return known
    with file.open("rb") as opened:
        return [*size_and_time, hashlib.file_digest(opened, "sha256").hexdigest()]


def combined(hashes: FileHashes) -> str:
    """One hash for all files: of their names and contents, wherever they are and since when."""
    lines = [f"{name} {sha256}\n" for name, (_, _, sha256) in sorted(hashes.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tokenizer_sha256(model_dir: Path, tokenizer: Any) -> str:
    """A hash of the vocabulary and the chat template."""
    file = model_dir / "tokenizer.json"
    vocabulary = sorted(tokenizer.get_vocab().items())
    content = file.read_bytes() if file.is_file() else repr(vocabulary).encode()
    return hashlib.sha256(content + str(tokenizer.chat_template).encode()).hexdigest()
