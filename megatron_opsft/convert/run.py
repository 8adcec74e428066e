"""Convert a model from one format to the other: plan, copy, let the result appear."""

import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from megatron_opsft.convert.compare import differing_tensors
from megatron_opsft.convert.megatron_layout import megatron_layout
from megatron_opsft.convert.output import Output, in_words
from megatron_opsft.convert.source import Source, open_source
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.device import peak_resident_bytes
from megatron_opsft.runtime.progress import Progress
from megatron_opsft.storage.direct_io import Staging, StagingOfThread
from megatron_opsft.storage.file_layout import FileLayout, Target, hf_layout
from megatron_opsft.storage.hf_writer import side_files
from megatron_opsft.storage.known_files import RECORD_NAME
from megatron_opsft.storage.partial import PartialDir, written_whole
from megatron_opsft.storage.regions import row_chunks
from megatron_opsft.storage.replacing import check_out
from megatron_opsft.weights.rectangles import Rect

Format = Literal["megatron", "hf"]
MAX_SHARD_BYTES = 5_000_000_000
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a conversion did; bytes are those of the output's tensors."""

    out: str
    tensors: int
    bytes: int
    seconds: float
    bytes_per_second: float
    peak_rss_mb: float
    already_complete: bool = False
    verified: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to write: dtype None keeps the source's; bytes of a file; threads."""

    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    workers: int = 1
    overwrite: bool = False


def convert_model(
    directory: Path,
    out: Path,
    to: Literal["hf", "megatron"],
    *,
    config_from: Path | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    verify: bool = False,
    workers: int = 1,
) -> Figures:
    """Write the model in `directory` to `out`, which appears when it is whole.

    config_from: as in `open_source`; dtype: of DTYPES; verify: read it back and compare. Errors:
    `UserError`.
    """
    source = open_source(directory, config_from)
    if source.is_megatron == (to == "megatron"):
        kind = "Megatron checkpoint" if source.is_megatron else "Hugging Face directory"
        raise UserError(f"{directory} is a {kind} already; convert it the other way")
    settings = Settings(
        dtype=DTYPES[dtype] if dtype else None,
        max_shard_bytes=max_shard_bytes,
        workers=workers,
        overwrite=overwrite,
    )
    figures = convert(source, out, to, settings)
    if not verify:
        return figures
    wanted = settings.dtype or source.only_dtype()
    if lines := differing_tensors(source, open_source(out), dtype=wanted, workers=workers):
        raise UserError(f"{out} differs from {directory}: {'; '.join(lines[:4])}")
    return replace(figures, verified=True)


def convert(source: Source, out_dir: Path, to: Format, settings: Settings) -> Figures:
    """Write `source` to `out_dir` in the other format, which appears there when it is whole.

    Errors: `UserError`; after one nothing is left.
    """
    started = time.monotonic()
    dtype = settings.dtype or source.only_dtype()
    identity: dict[str, object] = {
        "format": "hf" if to == "hf" else "megatron torch_dist",
        "architecture": source.table.shape.architecture,
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": source.table.shape.vocab_size,
        "max_shard_bytes": settings.max_shard_bytes,
        "source": source.identity(),
    }
    layout = _layout(source, to, dtype, settings.max_shard_bytes)
    output = Output(out_dir, layout, identity)
    complete = output.is_complete() and not settings.overwrite
    if complete:
        output.remove_leftovers()
    else:
        if not settings.overwrite:
            output.explain_existing()
        check_out(out_dir, source.paths(), overwrite=settings.overwrite)
        with written_whole(out_dir) as partial:
            output.check_room()
            partial.open_files(layout.files)
            _copy_all(source, layout, partial, dtype, settings.workers)
            small = side_files(source.config_dir, dtype) | layout.small_files
            partial.write_small(small | {RECORD_NAME: output.record})
    seconds = time.monotonic() - started
    return Figures(
        out=str(out_dir),
        tensors=len(layout.targets),
        bytes=layout.num_bytes,
        seconds=round(seconds, 3),
        bytes_per_second=0 if complete else round(layout.num_bytes / seconds),
        peak_rss_mb=round(peak_resident_bytes() / 2**20, 1),
        already_complete=complete,
    )


def _layout(source: Source, to: Format, dtype: torch.dtype, max_bytes: int) -> FileLayout:
    if to == "hf":
        return hf_layout(source.table.hf_shapes(), dtype, max_bytes)
    scratch = Path(tempfile.mkdtemp(prefix="megatron-opsft-"))
    try:
        return megatron_layout(source.table, dtype, max_bytes, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _copy_all(
    source: Source, layout: FileLayout, partial: PartialDir, dtype: torch.dtype, workers: int
) -> None:
    staging = StagingOfThread()
    progress = Progress("converting", layout.num_bytes, words=in_words)
    with progress, ThreadPoolExecutor(workers) as pool:

        def copy(target: Target) -> None:
            copy_target(source, target, partial, dtype, progress, staging.mine)

        for _ in pool.map(copy, layout.targets):  # after an error no other one is begun
            pass


def copy_target(
    source: Source,
    target: Target,
    partial: PartialDir,
    dtype: torch.dtype,
    progress: Progress,
    staging: Staging,
) -> None:
    """All rows of one tensor, a chunk at a time: put together in memory, then written."""
    region, width = target.region, target.parts[0].target.col1
    file = partial.files[str(region.path)]
    for first, last in row_chunks(0, target.num_filled, region.row_bytes):
        offset = region.offset_of(first)
        data = staging.place_for(offset, (last - first) * region.row_bytes)
        rows = torch.frombuffer(data, dtype=dtype).view(last - first, *region.shape[1:])
        window = Rect(target.name, first, last, 0, width)
        for part in target.parts:
            cut = part.inverse.cut(window)
            if cut is not None:
                read, out = cut.target, cut.source.relative_to(window).view(rows)
                source.copy_rows(read.tensor, read.row0, read.row1, out)
        file.write_staged(data, offset)
        progress.advance(len(data))
    progress.advance(region.num_bytes - target.num_filled * region.row_bytes)
