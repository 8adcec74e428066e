"""Convert a model from one format to the other, and compare two models of either format."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from megatron_opsft.commands.convert.megatron_layout import megatron_layout
from megatron_opsft.errors import UserError, log
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.adapter_config import read_adapter_config
from megatron_opsft.models.storage.adapters import MergedTensors, StoredAdapter
from megatron_opsft.models.storage.hf_files import (
    SAFETENSORS_DTYPES,
    stacks_experts,
)
from megatron_opsft.models.storage.hf_writer import (
    MAX_SHARD_BYTES,
    Target,
    hf_layout,
    side_files,
)
from megatron_opsft.models.storage.large_files import Region, Staging, row_chunks
from megatron_opsft.models.storage.model_paths import (
    has_hf_weights,
    is_dist_checkpoint,
    resolve_model,
)
from megatron_opsft.models.storage.partial import PartialFiles, written_whole
from megatron_opsft.models.storage.replacing import check_out
from megatron_opsft.models.storage.stored_weights import (
    StoredWeights,
    base_of,
    carried_of,
    directories_of,
    open_weights,
)
from megatron_opsft.models.weights.rectangles import Rect, num_rows
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import TensorShape, record
from megatron_opsft.runtime.device import peak_resident_bytes
from megatron_opsft.runtime.durable import write_files
from megatron_opsft.runtime.progress import Progress

Format = Literal["megatron", "hf"]
_staging = Staging()
_NUM_THREADS = 3  # while one waits for the disk to write, others read and lay out


class Source(NamedTuple):
    """An opened model of either format."""

    directory: Path
    config_dir: Path
    """Hugging Face directory of its configuration and tokenizer."""
    table: WeightTable
    """Its names are TransformerEngine's, which checkpoints use."""
    tensors: StoredWeights
    carried: Mapping[str, Region]
    """Tensors of other parts of the model."""

    def shapes(self) -> dict[str, TensorShape]:
        """Return name -> shape of all tensors, carried ones last."""
        carried = {name: region.shape for name, region in self.carried.items()}
        return self.table.hf_shapes() | carried

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        if name in self.carried:
            return self.carried[name].dtype
        return self.tensors.dtype(name)

    def dtypes(self, wanted: str | None = None) -> dict[str, torch.dtype]:
        """Return name -> dtype of all tensors: their own, or the wanted one except for what is
        carried. Errors: `UserError` naming a tensor whose dtype no file can have.
        """
        dtypes = {}
        for name in self.shapes():
            if wanted is not None and name not in self.carried:
                dtypes[name] = getattr(torch, wanted)
            else:
                dtypes[name] = self.dtype(name)
            if dtypes[name] not in SAFETENSORS_DTYPES.values():
                raise UserError(
                    f"{self.directory}: tensor {name} is {dtypes[name]}, which is not supported; "
                    "give --dtype"
                )
        return dtypes

    def copy_rows(self, name: str, start: int, out: torch.Tensor) -> None:
        """Read as many rows as `out` has, from row `start` on, and cast them into it."""
        if name in self.carried:
            self.carried[name].copy_rows(start, out, name)
        else:
            self.tensors.copy_rows(name, start, out)


def open_source(directory: Path, config_dir: Path | None = None) -> Source:
    """Open a Hugging Face directory or a Megatron checkpoint and check it without reading weights.

    config_dir: Hugging Face directory of the configuration and tokenizer, if the checkpoint does
    not hold them itself.
    Errors: `UserError` naming what is missing, unexpected or damaged.
    """
    if config_dir is not None:
        config_dir = resolve_model(str(config_dir), option="--config-from")
    elif is_dist_checkpoint(directory) and not (directory / "config.json").is_file():
        raise UserError(
            f"{directory} holds no config.json; give --config-from with the Hugging Face directory "
            "that the model came from"
        )
    config_dir = config_dir or directory
    table = WeightTable(read_model_shape(config_dir), "te")
    tensors = open_weights(directory, table)
    carried = carried_of(directory, table)
    if not carried and has_hf_weights(config_dir):
        # Another program wrote the checkpoint, or an earlier version.
        carried = carried_of(config_dir, table)
    if not carried and table.architecture.nested_in:
        log.warning(
            "%s: no tensors of vision or multi-token prediction were found, and what is written "
            "will have none; --config-from takes them from a Hugging Face directory with weights",
            directory,
        )
    return Source(directory, config_dir, table, tensors, carried)


def open_to_convert(
    directory: Path, to: Format, config_dir: Path | None = None
) -> Source:
    """Open a model that is to be written in the format `to`; see `open_source`.

    Errors: `UserError` also if it has that format already.
    """
    source = open_source(directory, config_dir)
    is_megatron = is_dist_checkpoint(directory)
    if is_megatron == (to == "megatron"):
        kind = "Megatron checkpoint" if is_megatron else "Hugging Face directory"
        raise UserError(f"{directory} is a {kind} already; convert it the other way")
    return source


def open_merged(adapter_dir: Path, base: str | None = None) -> Source:
    """Open a model with a LoRA adapter of PEFT's added, and check both without reading weights.

    base: the model that the adapter belongs to; None: the one that its adapter_config.json names.
    Errors: `UserError` naming what is missing, unexpected or damaged.
    """
    adapter_dir = adapter_dir.expanduser()
    config = read_adapter_config(adapter_dir, "adapter")
    if is_dist_checkpoint(adapter_dir):
        raise UserError(
            f"{adapter_dir} is a checkpoint, whose base model is known: give `convert to-hf "
            f"--megatron {adapter_dir} --out DIR`"
        )
    base_dir = resolve_model(base, option="--base") if base else base_of(adapter_dir)
    whole = open_source(base_dir)
    adapter = StoredAdapter(adapter_dir, whole.table, config.lora)
    merged = MergedTensors(whole.tensors, adapter)
    return Source(adapter_dir, base_dir, whole.table, merged, whole.carried)


@record
class Figures:
    """Figures of a finished conversion."""

    tensors: int
    bytes: int
    """Bytes of the output's tensors."""
    seconds: float
    peak_rss_mb: float


def write_source(
    source: Source,
    out: Path,
    to: Format,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    verify: bool = False,
) -> Figures:
    """Write an opened model to `out`, which appears when it is whole.

    dtype: None for the source's. verify: read the result back and compare. Errors: `UserError`. On
    an error no output remains, except one that differs when `verify` compares it.
    """
    started = time.monotonic()
    # The weight files are named too, since links may lead to them.
    inputs = [source.directory, source.config_dir, *source.tensors.files()]
    inputs += [region.path for region in source.carried.values()]
    check_out(out, inputs, overwrite=overwrite)
    dtypes = source.dtypes(dtype)
    directories = directories_of(source.directory)
    stacks = stacks_experts(source.table, *directories, source.config_dir)
    if to == "hf":
        layout = hf_layout(
            source.shapes(),
            dtypes,
            max_shard_bytes,
            stack_experts=stacks,
        )
    else:
        layout = megatron_layout(
            source.table,
            dtypes,
            source.carried,
            max_shard_bytes,
            stack_experts=stacks,
        )
    num_bytes = sum(target.region.num_bytes for target in layout.targets)
    with (
        written_whole(out, layout.files) as partial,
        Progress("converting", num_bytes, unit="B") as progress,
    ):
        _copy_all(source, layout.targets, partial, progress)
        main_dtype = dtypes[source.table.embedding_name]
        small_files = side_files(source.config_dir, main_dtype) | layout.small_files
        write_files(partial.directory, small_files)
    seconds = time.monotonic() - started
    if verify:
        lines = differing_tensors(source, open_source(out), dtypes=dtypes)
        if lines:
            raise UserError(
                f"{out} differs from {source.directory}: {'; '.join(lines[:4])}"
            )
    return Figures(
        tensors=len(layout.targets),
        bytes=num_bytes,
        seconds=round(seconds, 3),
        peak_rss_mb=round(peak_resident_bytes() / 2**20, 1),
    )


def _copy_all(
    source: Source, targets: Sequence[Target], partial: PartialFiles, progress: Progress
) -> None:
    """Copy all tensors, chunk by chunk. Errors: the first chunk's that fails; the others stop."""
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        chunks = []
        for target in targets:
            stop = target.copies[-1].target.row1  # the last copy has the last rows
            for first, last in row_chunks(0, stop, target.region.row_bytes):
                chunks.append(
                    pool.submit(_copy_rows, source, target, first, last, partial)
                )
        try:
            for chunk in as_completed(chunks):
                progress.update(chunk.result())
        except BaseException:
            # Chunks that have begun are waited for when the block ends.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _copy_rows(
    source: Source, target: Target, first: int, last: int, partial: PartialFiles
) -> int:
    """Assemble rows of one tensor in memory and write them. Returns the number of bytes."""
    region = target.region
    data = _staging.place_for((last - first) * region.row_bytes)
    rows = torch.frombuffer(data, dtype=region.dtype).view(-1, *region.shape[1:])
    # Each copy has all columns: nothing is sharded here.
    width = target.copies[0].target.col1
    window = Rect(target.name, first, last, 0, width)
    for copy in target.copies:
        part = copy.cut_target(window)
        if part is not None:
            read = part.source
            out = part.target.relative_to(window).view(rows)
            source.copy_rows(read.tensor, read.row0, out)
    partial.files[str(region.path)].write(data, region.offset_of(first))
    return len(data)


def differing_tensors(
    first: Source,
    second: Source,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> list[str]:
    """Return one line for each tensor that differs in a bit; none for equal models.

    dtypes: both are cast to these first; None: dtypes must be equal too. Errors: `UserError` for
    models of different architecture or size.
    """
    if first.table.hf_shapes() != second.table.hf_shapes():
        raise UserError(
            f"{first.directory} and {second.directory} are models of different architecture or size"
        )
    shapes, others = first.shapes(), second.shapes()
    lines = []
    for name in sorted(shapes.keys() ^ others.keys()):  # of vision and the like
        lines.append(
            f"{name}: only in {(first if name in shapes else second).directory}"
        )
    shapes = {name: shape for name, shape in shapes.items() if name in others}
    sides = first, second
    with Progress("comparing", len(shapes), unit=" tensors") as progress:
        for name, shape in shapes.items():
            if dtypes is None:
                dtype, other = (side.dtype(name) for side in sides)
            else:
                dtype = other = dtypes[name]
            if shape != others[name]:
                lines.append(f"{name}: {list(shape)} against {list(others[name])}")
            elif dtype is not other:
                lines.append(f"{name}: {dtype} against {other}")
            elif not _are_equal(sides, name, shape, dtype):
                lines.append(f"{name}: other values")
            progress.update()
    return lines


def _are_equal(
    sides: tuple[Source, Source],
    name: str,
    shape: TensorShape,
    dtype: torch.dtype,
) -> bool:
    """True if a tensor is the same on both sides, bit for bit, after a cast to `dtype`."""
    row_bytes = prod(shape[1:]) * dtype.itemsize
    for start, stop in row_chunks(0, num_rows(shape), row_bytes):
        both = []
        for side in sides:
            rows = torch.empty(stop - start, *shape[1:], dtype=dtype)
            side.copy_rows(name, start, rows)
            both.append(rows.view(torch.uint8))
        if not torch.equal(*both):
            return False
    return True
