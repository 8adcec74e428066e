"""Ranks connect when they have something to say to each other, not each with all."""

import os
import socket

import psutil
import torch.distributed as dist
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

NUM_RANKS = 16


def start_and_talk() -> int:
    """As a launcher without torchrun starts a rank: its connections after a step's exchange."""
    rank = dist.get_rank()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = broadcast_object(free.getsockname()[1])
    dist.destroy_process_group()
    names = {"RANK": rank, "WORLD_SIZE": NUM_RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    start_distributed(select_device("cpu"), ParallelConfig())
    assert gather_from_all([rank]) == list(range(NUM_RANKS))
    assert broadcast_object(rank) == 0
    assert deal({(rank + 1) % NUM_RANKS: [rank]}) == [(rank - 1) % NUM_RANKS]
    found = psutil.Process().net_connections("inet")
    dist.barrier()
    stop_distributed()
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in found)


def test_a_rank_has_few_connections() -> None:
    many = World(NUM_RANKS)
    try:
        counts = many.run(start_and_talk, NUM_RANKS)
    finally:
        many.stop()
    assert max(counts[1:]) < NUM_RANKS - 1
