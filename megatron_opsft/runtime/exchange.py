"""Bytes between all ranks of the job in ceil(log2 W) rounds, without padding.

In every round a rank sends to one rank and receives from another, `distance` = 1, 2, 4, ... ranks
away: a rank has at most 2 ceil(log2 W) partners however large the job is, and nothing is filled up
to the size of the largest part. Source: Bruck et al., "Efficient algorithms for all-to-all
communications in multiport message-passing systems" (IEEE TPDS 1997).

Everything here is collective over the world; tensors are uint8 vectors in the CPU's memory.
"""

import hashlib
import pickle
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_bytes(mine: Tensor) -> list[Tensor]:
    """Every rank's vector, in rank order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    held = [mine]  # the vectors of this rank, of the next one, and so on
    distance = 1
    while distance < world_size:
        held += _swap(held[: world_size - distance], to=rank - distance, source=rank + distance)
        distance *= 2
    return held[world_size - rank :] + held[: world_size - rank]


def route_bytes(parts: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """parts: rank -> vector for it. Returns the vectors for this rank by the rank they are from.

    A vector travels in the rounds that the binary digits of its way have, so a rank forwards about
    log2(W) / 2 times what it sends.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    held = [_Parcel(rank, to, content) for to, content in parts.items()]
    distance = 1
    while distance < world_size:
        leaving = [p for p in held if (p.to - rank) % world_size & distance]
        held = [p for p in held if not (p.to - rank) % world_size & distance]
        held += _swap_parcels(leaving, to=rank + distance, source=rank - distance)
        distance *= 2
    return {p.source: p.content for p in sorted(held, key=lambda p: p.source)}


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


class _Parcel(NamedTuple):
    source: int
    to: int
    content: Tensor


def _swap_parcels(leaving: Sequence[_Parcel], *, to: int, source: int) -> list[_Parcel]:
    labels = torch.tensor([(p.source, p.to, len(p.content)) for p in leaving], dtype=torch.int64)
    contents = [parcel.content for parcel in leaving]
    packed = [_NOTHING, _NOTHING]
    if leaving:
        packed = [labels.flatten().view(torch.uint8), torch.cat(contents)]
    came, content = _swap(packed, to=to, source=source)
    rows = came.view(torch.int64).view(-1, 3).tolist()
    pieces = content.split([size for _, _, size in rows])
    together = zip(rows, pieces, strict=True)
    return [_Parcel(first, last, piece) for (first, last, _), piece in together]


def _swap(vectors: Sequence[Tensor], *, to: int, source: int) -> list[Tensor]:
    """Send the vectors to one rank, receive as many from another; ranks count modulo W."""
    world_size = dist.get_world_size()
    to, source = to % world_size, source % world_size
    sizes = torch.tensor([len(vector) for vector in vectors], dtype=torch.int64)
    came = _exchange(sizes, torch.empty_like(sizes), to, source)
    room = torch.empty(int(came.sum()), dtype=torch.uint8)
    content = _exchange(torch.cat(list(vectors)), room, to, source)
    return list(content.split(came.tolist()))


def _exchange(mine: Tensor, room: Tensor, to: int, source: int) -> Tensor:
    """`room`, filled with what `source` sends; both sides know when there is nothing to send."""
    works = []
    if len(mine):
        works.append(dist.isend(mine, to))
    if len(room):
        works.append(dist.irecv(room, source))
    for work in works:
        assert work is not None  # None: this rank is not in the group
        work.wait()
    return room


_NOTHING = torch.empty(0, dtype=torch.uint8)
