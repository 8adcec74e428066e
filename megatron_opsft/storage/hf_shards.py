"""What a weight file of a Hugging Face directory holds: a region per tensor, read from headers."""

import json
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_opsft.errors import UserError
from megatron_opsft.storage.regions import Region, data_offset, load_without_data, opened

SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_regions(path: Path) -> dict[str, Region]:
    """Name -> region of every tensor in a .safetensors or .bin file.

    Errors: `UserError`, naming file and tensor, for a file that is missing, damaged or cut short,
    or holds another dtype than float32, float16, bfloat16.
    """
    if not path.is_file():
        raise UserError(f"shard {path} is missing; the index lists it")
    regions = _safetensors(path) if path.suffix == ".safetensors" else _torch_archive(path)
    size = path.stat().st_size
    for name, region in regions.items():
        if region.offset + region.num_bytes > size:
            raise UserError(f"{path} is damaged or cut short: tensor {name} ends behind the file")
    return regions


def _safetensors(path: Path) -> dict[str, Region]:
    """safetensors itself checks the header; it does not tell offsets, so they are read here."""
    try:
        with safe_open(path, framework="pt"):
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path} is damaged or cut short: {error}") from None
    header.pop("__metadata__", None)
    regions = {}
    for name, entry in header.items():
        if entry["dtype"] not in SAFETENSORS_DTYPES:
            raise _unsupported(path, name, entry["dtype"])
        regions[name] = Region(
            path=path,
            offset=8 + length + entry["data_offsets"][0],
            shape=tuple(entry["shape"]),
            dtype=SAFETENSORS_DTYPES[entry["dtype"]],
        )
    return regions


def _torch_archive(path: Path) -> dict[str, Region]:
    """A state dict written by torch.save (1.6 or later): a zip with uncompressed storages."""
    with opened(path) as file:
        if file.read(4) != b"PK\x03\x04":
            raise UserError(
                f"{path} is damaged, or older than torch 1.6; save it again, best as safetensors"
            )
        file.seek(0)
        state = load_without_data(file, str(path))
        if not isinstance(state, dict):
            raise UserError(f"{path} holds a {type(state).__name__}, not a state dict")
        return {name: _archive_region(path, file, name, state[name]) for name in state}


def _archive_region(path: Path, file: IO[bytes], name: object, tensor: object) -> Region:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise UserError(f"{path}: entry {name!r} is no tensor; give a plain state dict")
    if tensor.dtype not in SAFETENSORS_DTYPES.values():
        raise _unsupported(path, name, str(tensor.dtype))
    offset = data_offset(tensor, file, f"{path}: tensor {name}")
    return Region(path=path, offset=offset, shape=tuple(tensor.shape), dtype=tensor.dtype)


def _unsupported(path: Path, name: str, dtype: str) -> UserError:
    return UserError(
        f"{path}: tensor {name} has dtype {dtype}; supported: {', '.join(SAFETENSORS_DTYPES)} "
        "(quantised checkpoints are not)"
    )
