"""Whether two models, in either format, hold the same weights: a hash per tensor on both sides."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch

from megatron_opsft.convert.progress import Progress
from megatron_opsft.convert.source import Source
from megatron_opsft.errors import UserError
from megatron_opsft.storage.direct_io import Staging
from megatron_opsft.storage.regions import row_chunks


def tensor_hash(
    source: Source, name: str, dtype: torch.dtype, progress: Progress, staging: Staging
) -> str:
    """SHA-256 of an HF tensor's values in row-major order, cast to `dtype` first."""
    shape = source.table.hf_shapes()[name]
    row_bytes = prod(shape[1:]) * dtype.itemsize
    digest = hashlib.sha256()
    for start, stop in row_chunks(0, shape[0], row_bytes):
        data = staging.place_for(0, (stop - start) * row_bytes)
        rows = torch.frombuffer(data, dtype=dtype).view(stop - start, *shape[1:])
        source.tensors.copy_rows(name, start, stop, rows)
        digest.update(data)
        progress.advance((stop - start) * row_bytes)
    return digest.hexdigest()


def differing_tensors(
    first: Source, second: Source, *, dtype: torch.dtype | None = None, workers: int = 1
) -> list[str]:
    """One line for each tensor that differs; empty for equal models.

    dtype: compare after a cast of both to it; None: dtypes must be equal too. Errors: `UserError`
    when the models have different tensors altogether.
    """
    shapes = first.table.hf_shapes()
    if shapes != second.table.hf_shapes():
        raise UserError(
            f"{first.directory} and {second.directory} are models of different architecture or size"
        )
    sizes = {n: prod(s) * (dtype or first.tensors.dtype(n)).itemsize for n, s in shapes.items()}
    staging = Staging()
    with Progress("comparing", 2 * sum(sizes.values())) as progress:

        def difference(name: str) -> str | None:
            dtypes = [source.tensors.dtype(name) for source in (first, second)]
            if dtype is None and dtypes[0] is not dtypes[1]:
                return f"{name}: {dtypes[0]} against {dtypes[1]}"
            hashes = [
                tensor_hash(source, name, dtype or dtypes[0], progress, staging)
                for source in (first, second)
            ]
            return None if hashes[0] == hashes[1] else f"{name}: other values"

        with ThreadPoolExecutor(workers) as pool:
            return [line for line in pool.map(difference, shapes) if line is not None]
