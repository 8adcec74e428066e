"""Convert a model from one format to the other: plan, copy, let the result appear."""

import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron_opsft.convert.megatron_layout import megatron_layout
from megatron_opsft.convert.output import Output
from megatron_opsft.convert.progress import Progress
from megatron_opsft.convert.source import Source
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.memory import peak_resident_bytes
from megatron_opsft.storage.direct_io import Staging, StagingOfThread
from megatron_opsft.storage.file_layout import FileLayout, Target, hf_layout
from megatron_opsft.storage.hf_writer import side_files
from megatron_opsft.storage.regions import row_chunks
from megatron_opsft.storage.replacing import check_out
from megatron_opsft.weights.rectangles import Rect

Format = Literal["megatron", "hf"]
MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a conversion did; bytes are those of the output's tensors."""

    out: str
    tensors: int
    bytes: int
    resumed_bytes: int
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


def convert(source: Source, out_dir: Path, to: Format, settings: Settings) -> Figures:
    """Write `source` to `out_dir` in the other format; continues where a killed try stopped.

    Errors: `UserError`; after one about the source nothing is left, after one about the output what
    is written stays for the next try, out of sight.
    """
    started = time.monotonic()
    dtype = settings.dtype or source.only_dtype()
    record: dict[str, object] = {
        "format": "hf" if to == "hf" else "megatron torch_dist",
        "architecture": source.table.shape.architecture,
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": source.table.shape.vocab_size,
        "max_shard_bytes": settings.max_shard_bytes,
        "source": source.identity(),
    }
    layout = _layout(source, to, dtype, settings.max_shard_bytes)
    output = Output(out_dir, layout, record)
    complete = output.is_complete() and not settings.overwrite
    resumed = 0
    if complete:
        output.remove_leftovers()
    else:
        if not settings.overwrite:
            output.explain_existing()
        check_out(out_dir, source.paths(), overwrite=settings.overwrite)
        with output:
            resumed = sum(t.region.num_bytes for t in layout.targets if t.name in output.finished)
            try:
                _copy_all(source, layout, output, dtype, settings.workers, resumed)
            except SourceError:
                output.discard()
                raise
            output.finish(side_files(source.config_dir, dtype))
    seconds = time.monotonic() - started
    written = 0 if complete else layout.num_bytes - resumed
    return Figures(
        out=str(out_dir),
        tensors=len(layout.targets),
        bytes=layout.num_bytes,
        resumed_bytes=resumed,
        seconds=round(seconds, 3),
        bytes_per_second=round(written / seconds),
        peak_rss_mb=round(peak_resident_bytes() / 2**20, 1),
        already_complete=complete,
    )


class SourceError(UserError):
    """The source turned out to be unusable while it was read."""


def _layout(source: Source, to: Format, dtype: torch.dtype, max_bytes: int) -> FileLayout:
    if to == "hf":
        return hf_layout(source.table.hf_shapes(), dtype, max_bytes)
    scratch = Path(tempfile.mkdtemp(prefix="megatron-opsft-"))
    try:
        return megatron_layout(source.table, dtype, max_bytes, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _copy_all(
    source: Source,
    layout: FileLayout,
    output: Output,
    dtype: torch.dtype,
    workers: int,
    resumed: int,
) -> None:
    pending = [target for target in layout.targets if target.name not in output.finished]
    staging = StagingOfThread()
    with Progress("converting", layout.num_bytes, done=resumed) as progress:

        def copy(target: Target) -> None:
            copy_target(source, target, output, dtype, progress, staging.mine)

        if workers == 1:
            for target in pending:
                copy(target)
            return
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(copy, target) for target in pending]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def copy_target(
    source: Source,
    target: Target,
    output: Output,
    dtype: torch.dtype,
    progress: Progress,
    staging: Staging,
) -> None:
    """All rows of one tensor, a chunk at a time: put together in memory, then written."""
    region, width = target.region, target.parts[0].target.col1
    for first, last in row_chunks(0, target.num_filled, region.row_bytes):
        data = staging.place_for(region.offset_of(first), (last - first) * region.row_bytes)
        rows = torch.frombuffer(data, dtype=dtype).view(last - first, *region.shape[1:])
        window = Rect(target.name, first, last, 0, width)
        for part in target.parts:
            cut = part.inverse.cut(window)
            if cut is not None:
                _read(source, cut.target, cut.source.relative_to(window).view(rows))
        output.write(target, first, data)
        progress.advance(len(data))
    progress.advance(region.num_bytes - target.num_filled * region.row_bytes)
    output.done(target)


def _read(source: Source, rows: Rect, out: torch.Tensor) -> None:
    try:
        source.copy_rows(rows.tensor, rows.row0, rows.row1, out)
    except UserError as error:
        raise SourceError(str(error)) from None
