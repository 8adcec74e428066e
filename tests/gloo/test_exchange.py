"""Bytes between ranks: everything arrives at its place, and nothing else does; and ranks connect
when they have something to say to each other, not each with all.

That facts and tokens of responses do: test_end_to_end, whose layouts train alike.
"""

import os

import psutil
import pytest
import torch
import torch.distributed as dist
from processes import rank_environments
from world import World

from megatron_opsft.config import ParallelConfig
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.distributed import (
    broadcast_object,
    deal,
    gather_from_all,
    start_distributed,
    stop_distributed,
)
from megatron_opsft.runtime.exchange import all_gather_bytes, route_bytes


def route_and_gather() -> None:
    """Checks on every rank what the others sent; sizes differ, and some ranks send nothing."""
    me, size = dist.get_rank(), dist.get_world_size()
    gathered = all_gather_bytes(torch.full((3 * me,), me, dtype=torch.uint8))
    assert [part.tolist() for part in gathered] == [[r] * 3 * r for r in range(size)]

    def part(source: int, to: int) -> torch.Tensor:
        return torch.arange(source * 16 + to + 1, dtype=torch.uint8)

    pairs = {(source, to) for source in range(size) for to in range(size) if (source + to) % 3}
    came = route_bytes({to: part(me, to) for to in range(size) if (me, to) in pairs})
    assert list(came) == [source for source in range(size) if (source, me) in pairs]
    for source, content in came.items():
        assert content.tolist() == part(source, me).tolist()

    items = [me] * (me % 3) + ["x" * 1000 * me]
    expected = [item for r in range(size) for item in [r] * (r % 3) + ["x" * 1000 * r]]
    assert gather_from_all(items) == expected
    assert deal({0: items}) == (expected if me == 0 else [])
    assert deal({size - 1: items, me: ["own"]}) == (
        expected[: -len(items)] + ["own"] if me == size - 1 else ["own"]
    )
    assert deal({}) == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_everything_that_is_sent_arrives_once_and_in_the_order_of_ranks(
    world: World, world_size: int
) -> None:
    world.run(route_and_gather, world_size)


NUM_RANKS = 16


def start_and_talk() -> int:
    """As a launcher without torchrun starts a rank: its connections after a step's exchange."""
    rank = dist.get_rank()
    os.environ.update(broadcast_object(rank_environments(NUM_RANKS))[rank])
    dist.destroy_process_group()
    start_distributed(select_device("cpu"), ParallelConfig())
    assert gather_from_all([rank]) == list(range(NUM_RANKS))
    assert broadcast_object(rank) == 0
    assert deal({(rank + 1) % NUM_RANKS: [rank]}) == [(rank - 1) % NUM_RANKS]
    found = psutil.Process().net_connections("inet")
    dist.barrier()
    stop_distributed()
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in found)


def test_a_rank_has_few_connections() -> None:
    many = World()
    try:
        counts = many.run(start_and_talk, NUM_RANKS)
    finally:
        many.stop()
    assert max(counts[1:]) < NUM_RANKS - 1
