"""Bytes between all ranks of the job. Everything here is collective over the world; tensors are
uint8 vectors in the CPU's memory.
"""

import hashlib
import pickle
from collections.abc import Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_bytes(mine: Tensor) -> list[Tensor]:
    """Every rank's vector, in rank order."""
    world_size = dist.get_world_size()
    sizes = torch.empty(world_size, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(mine)]))
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: len(mine)] = mine
    rows = torch.empty(world_size * len(padded), dtype=torch.uint8)
    if len(padded):
        dist.all_gather_into_tensor(rows, padded)
    rows = rows.view(world_size, -1)
    return [row[:size] for row, size in zip(rows, sizes.tolist(), strict=True)]


def route_bytes(parts: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """parts: rank -> vector for it. Returns the vectors for this rank by the rank they are from, in
    rank order. Only ranks that have something for each other connect.
    """
    me = dist.get_rank()
    told = [[to, len(content)] for to, content in parts.items()]
    sizes = all_gather_bytes(
        torch.tensor(told, dtype=torch.int64).flatten().view(torch.uint8)
    )
    came = {}
    for source, pairs in enumerate(sizes):
        for to, size in pairs.clone().view(torch.int64).view(-1, 2).tolist():
            if to == me:
                came[source] = torch.empty(size, dtype=torch.uint8)
    came |= {me: parts[me]} if me in parts else {}
    works = [
        dist.isend(part, to) for to, part in parts.items() if to != me and len(part)
    ]
    works += [
        dist.irecv(room, rank)
        for rank, room in came.items()
        if rank != me and len(room)
    ]
    for work in works:
        assert work is not None  # None: this rank is not in the group
        work.wait()
    return came


def to_bytes(value: Any) -> Tensor:
    """Anything that can be pickled, as a vector."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def from_bytes(vector: Tensor) -> Any:
    """What `to_bytes` was given, on another rank of this job."""
    return pickle.loads(vector.numpy().tobytes())


def digest_of(value: Hashable) -> Tensor:
    """uint8 [32], the same for equal values of plain types on every rank."""
    digest = hashlib.sha256(repr(value).encode()).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)
