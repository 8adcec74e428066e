"""How many sockets a rank has after the start, and after what a step says to the other ranks."""

import math
import os
import resource
import socket

import psutil
import torch
import torch.distributed as dist
from world import World

from megatron_opsft.config import ParallelConfig
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.diagnosis import Limits
from megatron_opsft.runtime.distributed import (
    any_over_world,
    broadcast_object,
    deal,
    gather_from_all,
    start_distributed,
    stop_distributed,
)
from megatron_opsft.runtime.job import current_job
from megatron_opsft.runtime.phase import enter_phase
from megatron_opsft.runtime.watchdog import watched

NUM_RANKS = 16


def count_connections() -> int:
    """Of this process, those of the job: both ends of one that it has with itself."""
    dist.barrier()
    found = psutil.Process().net_connections("inet")
    dist.barrier()
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in found)


def start_and_talk() -> tuple[int, int, list[int]]:
    """As a launcher without torchrun starts a rank: sockets after the start and after a step
    without a model, and what rank 0 has gathered.
    """
    rank = dist.get_rank()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = broadcast_object(free.getsockname()[1])
    dist.destroy_process_group()
    names = {"RANK": rank, "WORLD_SIZE": NUM_RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    start_distributed(select_device("cpu"), ParallelConfig())
    assert len(set(resource.getrlimit(resource.RLIMIT_NOFILE))) == 1  # all that are allowed
    enter_phase("start", 0)  # the process is as old as the one that it was forked from
    with watched(current_job(), Limits()):
        started = count_connections()
        assert gather_from_all([rank]) == list(range(NUM_RANKS))
        assert not any_over_world(False)
        assert broadcast_object(rank) == 0
        gathered = deal({0: [rank] * (rank % 3)})
        gradients, mine = torch.ones(NUM_RANKS), torch.empty(1)
        dist.reduce_scatter_tensor(mine, gradients)
        dist.all_gather_into_tensor(gradients, mine)
        assert gradients.tolist() == [NUM_RANKS] * NUM_RANKS
        worked = count_connections()
        stop_distributed()
    return started, worked, gathered


def test_sockets_of_a_rank_grow_with_the_logarithm_of_their_number() -> None:
    many = World(NUM_RANKS)
    try:
        counts = many.run(start_and_talk, NUM_RANKS)
    finally:
        many.stop()
    assert counts[0][2] == [rank for rank in range(NUM_RANKS) for _ in range(rank % 3)]
    # Ranks 1, 2, 4, 8 further on and back, the job's store, and the watchdog's of it.
    most = 2 * math.log2(NUM_RANKS) + 2
    assert max(worked for _, worked, _ in counts[1:]) <= most
    assert max(started for started, _, _ in counts[1:]) <= most
    # Rank 0 is the other end of every rank's store, twice.
    assert counts[0][1] <= most + 2 * NUM_RANKS
