"""Exchange of bytes between all ranks of the job.

Every function that communicates is collective over the world. Tensors are uint8 vectors in the
CPU's memory.
"""

import hashlib
import pickle
from collections.abc import Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_bytes(vector: Tensor) -> list[Tensor]:
    """Return every rank's vector, in rank order. Vectors may differ in length. Collective."""
    world_size = dist.get_world_size()
    sizes = torch.empty(world_size, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(vector)]))
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: len(vector)] = vector
    rows = torch.empty(world_size * len(padded), dtype=torch.uint8)
    if len(padded):
        dist.all_gather_into_tensor(rows, padded)
    rows = rows.view(world_size, -1)
    return [row[:size] for row, size in zip(rows, sizes.tolist(), strict=True)]


def route_bytes(vector_for: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Send a vector to each of some ranks. Collective; only ranks that send to each other connect.

    vector_for: rank -> the vector for it. Returns sender -> its vector for this rank, in rank
    order.
    """
    me = dist.get_rank()
    sizes_here = {rank: len(vector) for rank, vector in vector_for.items()}
    received = {}
    for sender, announced in enumerate(all_gather_bytes(to_bytes(sizes_here))):
        size_for = from_bytes(announced)
        if me in size_for:
            received[sender] = torch.empty(size_for[me], dtype=torch.uint8)
    works = []
    for rank, vector in vector_for.items():
        if rank == me:
            received[me] = vector
        elif len(vector):
            works.append(dist.isend(vector, rank))
    for sender, vector in received.items():
        if sender != me and len(vector):
            works.append(dist.irecv(vector, sender))
    for work in works:
        assert work is not None  # None: this rank is not in the group
        work.wait()
    return received


def to_bytes(value: Any) -> Tensor:
    """Pickle a value into a vector."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def from_bytes(vector: Tensor) -> Any:
    """Return the value of which a rank of this job has made the vector by `to_bytes`."""
    return pickle.loads(vector.numpy().tobytes())


def digest_of(value: Hashable) -> Tensor:
    """Return a hash, uint8 [32], the same on every rank for equal values of plain types."""
    digest = hashlib.sha256(repr(value).encode()).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)
