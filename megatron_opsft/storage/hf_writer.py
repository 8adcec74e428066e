"""Writing a Hugging Face model directory: in any order, and visible only when complete."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_opsft.storage.file_layout import hf_layout
from megatron_opsft.storage.hf_files import NAMED_WEIGHTS
from megatron_opsft.storage.partial import PartialFiles, written_whole
from megatron_opsft.storage.regions import Region, check_cast
from megatron_opsft.storage.replacing import check_out

MAX_SHARD_BYTES = 5_000_000_000
COPIED_PATTERNS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "tekken.json",
    "*.model",
    "chat_template*",
    "additional_chat_templates",
    "custom_generate",
)


def side_files(model_dir: Path, dtype: torch.dtype | None) -> dict[str, bytes]:
    """Config, generation config, tokenizer, chat template: relative name -> content.

    dtype: what config.json should say; None leaves it as it is.
    """
    files = {
        str(path.relative_to(model_dir)): path.read_bytes()
        for found in {p for pattern in COPIED_PATTERNS for p in model_dir.glob(pattern)}
        for path in (found.rglob("*") if found.is_dir() else [found])
        if path.is_file()
    }
    content = (model_dir / "config.json").read_bytes()
    if dtype is not None:
        config = json.loads(content)
        config.pop(NAMED_WEIGHTS, None)  # a file of the source, not one of the result
        for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]:
            config[key] = str(dtype).removeprefix("torch.")
        content = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return files | {"config.json": content}


def write_hf_model(
    out_dir: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    source_dir: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes a stream of (HF name, tensor) as a Hugging Face directory; one process calls it.

    tensors: each of `shapes` once, in any order, on any device; cast to `dtype`. shapes: every
    tensor of the model, `WeightTable.hf_shapes()`. source_dir: gives config.json, tokenizer,
    templates.

    Everything goes to a hidden sibling of `out_dir`, which takes its name after all data is on
    disk; after an error nothing is left.
    Errors: `UserError` if `out_dir` exists, or with `overwrite` is what may not be deleted; if
    another process writes there; for a value that is too large for the dtype; for a failed write.
    ValueError for a wrong, repeated or missing name, or a wrong shape.
    """
    check_out(out_dir, [source_dir], overwrite=overwrite)
    layout = hf_layout(shapes, dtype, max_shard_bytes)
    remaining = {target.name: target.region for target in layout.targets}
    with written_whole(out_dir) as partial:
        partial.open_files(layout.files)
        partial.write_small(side_files(source_dir, dtype) | layout.small_files)
        for name, tensor in tensors:
            if name not in remaining:
                raise ValueError(f"tensor {name} is not expected, or was already written")
            _write(partial, remaining.pop(name), name, tensor.detach().to("cpu"))
        if remaining:
            raise ValueError(f"tensors never written: {', '.join(sorted(remaining)[:8])}")


def _write(partial: PartialFiles, region: Region, name: str, tensor: Tensor) -> None:
    """Casts a tensor and puts it in its place."""
    if tuple(tensor.shape) != region.shape:
        raise ValueError(f"tensor {name} has shape {list(tensor.shape)}, not {list(region.shape)}")
    cast = tensor.to(region.dtype)
    check_cast(tensor, cast, f"tensor {name}")
    data = cast.contiguous().reshape(-1).view(torch.uint8).numpy().data
    partial.files[str(region.path)].write(data, region.offset)
