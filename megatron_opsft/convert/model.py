"""One model converted, from paths to figures."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from megatron_opsft.convert.compare import differing_tensors
from megatron_opsft.convert.run import MAX_SHARD_BYTES, Figures, Settings, convert
from megatron_opsft.convert.source import open_source
from megatron_opsft.errors import UserError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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
