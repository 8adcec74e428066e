"""Convert a model from one format to the other: plan, copy, let the result appear."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron_opsft.convert.compare import differing_tensors
from megatron_opsft.convert.megatron_layout import megatron_layout
from megatron_opsft.convert.paths import in_words
from megatron_opsft.convert.source import Source, open_source
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.device import peak_resident_bytes
from megatron_opsft.runtime.progress import Progress
from megatron_opsft.storage.direct_io import Staging
from megatron_opsft.storage.file_layout import FileLayout, Target, hf_layout
from megatron_opsft.storage.hf_writer import MAX_SHARD_BYTES, side_files
from megatron_opsft.storage.partial import PartialFiles, written_whole
from megatron_opsft.storage.regions import row_chunks
from megatron_opsft.storage.replacing import check_out
from megatron_opsft.weights.rectangles import Rect

Format = Literal["megatron", "hf"]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_staging = Staging()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a conversion did; bytes are those of the output's tensors."""

    out: str
    tensors: int
    bytes: int
    seconds: float
    bytes_per_second: float
    peak_rss_mb: float
    verified: bool


def convert_model(
    directory: Path,
    out: Path,
    to: Format,
    *,
    config_from: Path | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    verify: bool = False,
    workers: int = 1,
) -> Figures:
    """Write the model in `directory` to `out` in the other format; it appears when it is whole.

    config_from: as in `open_source`; dtype: of DTYPES, None for the source's; verify: read the
    result back and compare; workers: threads. Errors: `UserError`; nothing is left then, but a
    result that differs when it is compared.
    """
    source = open_source(directory, config_from)
    if source.is_megatron == (to == "megatron"):
        kind = "Megatron checkpoint" if source.is_megatron else "Hugging Face directory"
        raise UserError(f"{directory} is a {kind} already; convert it the other way")
    started = time.monotonic()
    check_out(out, source.paths(), overwrite=overwrite)
    wanted = DTYPES[dtype] if dtype else source.only_dtype()
    if to == "hf":
        layout = hf_layout(source.table.hf_shapes(), wanted, max_shard_bytes)
    else:
        layout = megatron_layout(source.table, wanted, max_shard_bytes)
    with written_whole(out) as partial:
        _check_room(out, layout)
        partial.open_files(layout.files)
        _copy_all(source, layout, partial, workers)
        partial.write_small(side_files(source.config_dir, wanted) | layout.small_files)
    seconds = time.monotonic() - started
    if verify and (
        lines := differing_tensors(source, open_source(out), dtype=wanted, workers=workers)
    ):
        raise UserError(f"{out} differs from {directory}: {'; '.join(lines[:4])}")
    return Figures(
        out=str(out),
        tensors=len(layout.targets),
        bytes=layout.num_bytes,
        seconds=round(seconds, 3),
        bytes_per_second=round(layout.num_bytes / seconds),
        peak_rss_mb=round(peak_resident_bytes() / 2**20, 1),
        verified=verify,
    )


def _check_room(out: Path, layout: FileLayout) -> None:
    """Errors: `UserError` when the disk has too little room for the result."""
    needed = sum(file.num_bytes for file in layout.files)
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise UserError(
            f"{out} needs {in_words(needed)}, but its disk has {in_words(free)} left; free some or "
            "choose another place"
        )


def _copy_all(source: Source, layout: FileLayout, partial: PartialFiles, workers: int) -> None:
    progress = Progress("converting", layout.num_bytes, words=in_words)
    with progress, ThreadPoolExecutor(workers) as pool:

        def copy(target: Target) -> None:
            copy_target(source, target, partial, progress)

        for _ in pool.map(copy, layout.targets):  # after an error no other one is begun
            pass


def copy_target(source: Source, target: Target, partial: PartialFiles, progress: Progress) -> None:
    """All rows of one tensor, a chunk at a time: put together in memory, then written."""
    region, width = target.region, target.parts[0].target.col1
    file = partial.files[str(region.path)]
    for first, last in row_chunks(0, target.num_filled, region.row_bytes):
        offset = region.offset_of(first)
        data = _staging.place_for(offset, (last - first) * region.row_bytes)
        rows = torch.frombuffer(data, dtype=region.dtype).view(last - first, *region.shape[1:])
        window = Rect(target.name, first, last, 0, width)
        for part in target.parts:
            cut = part.inverse.cut(window)
            if cut is not None:
                read, out = cut.target, cut.source.relative_to(window).view(rows)
                source.tensors.copy_rows(read.tensor, read.row0, read.row1, out)
        file.write_staged(data, offset)
        progress.advance(len(data))
    progress.advance(region.num_bytes - target.num_filled * region.row_bytes)
