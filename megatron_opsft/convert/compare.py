"""Whether two models, in either format, hold the same weights, read side by side."""

from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch

from megatron_opsft.convert.paths import in_words
from megatron_opsft.convert.source import Source
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.progress import Progress
from megatron_opsft.storage.direct_io import Staging
from megatron_opsft.storage.regions import row_chunks


def differing_tensors(
    first: Source, second: Source, *, dtype: torch.dtype | None = None, workers: int = 1
) -> list[str]:
    """One line for each tensor that differs in a bit; empty for equal models.

    dtype: compare after a cast of both to it; None: dtypes must be equal too. Errors: `UserError`
    when the models have different tensors altogether.
    """
    shapes = first.table.hf_shapes()
    if shapes != second.table.hf_shapes():
        raise UserError(
            f"{first.directory} and {second.directory} are models of different architecture or size"
        )
    sizes = {n: prod(s) * (dtype or first.tensors.dtype(n)).itemsize for n, s in shapes.items()}
    sides = [(source.tensors, Staging()) for source in (first, second)]
    with Progress("comparing", sum(sizes.values()), words=in_words) as progress:

        def difference(name: str) -> str | None:
            dtypes = [tensors.dtype(name) for tensors, _ in sides]
            if dtype is None and dtypes[0] is not dtypes[1]:
                return f"{name}: {dtypes[0]} against {dtypes[1]}"
            num_rows, *columns = shapes[name]
            row_bytes = sizes[name] // num_rows
            for start, stop in row_chunks(0, num_rows, row_bytes):
                read = []
                for tensors, staging in sides:
                    read.append(staging.place_for(0, (stop - start) * row_bytes))
                    rows = torch.frombuffer(read[-1], dtype=dtype or dtypes[0])
                    tensors.copy_rows(name, start, stop, rows.view(stop - start, *columns))
                if read[0] != read[1]:
                    return f"{name}: other values"
                progress.advance((stop - start) * row_bytes)
            return None

        with ThreadPoolExecutor(workers) as pool:
            return [line for line in pool.map(difference, shapes) if line is not None]
