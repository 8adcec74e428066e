"""The processes of one job, and a store of counters and values that all of them see.

Needs no Megatron. Unlike a collective, the store lets ranks go at their own pace.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.launcher import is_launched
from megatron_opsft.runtime.open_files import allow_open_files

_POLL_SECONDS = 0.05
_PATIENCE = timedelta(days=1)  # with a rank that is busy; one that is dead ends the job


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """This rank's place in the job; `store`: torch's key-value store.

    id: the same on all ranks of the job and in no other job.
    """

    rank: int
    world_size: int
    id: str
    store: Any

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def add(self, name: str, amount: int) -> int:
        """The shared counter `name` after `amount` was added to it; it starts at 0."""
        return self.store.add(name, amount)

    def put(self, name: str, value: str) -> None:
        """Let all ranks `get` it."""
        self.store.set(name, value)

    def get(self, name: str) -> str:
        """What some rank has put or will put there."""
        self.store.wait([name], _PATIENCE)
        return self.store.get(name).decode()

    def swap(self, name: str, expected: str, desired: str) -> str:
        """What stands at `name` afterwards: `desired` if it was `expected` before, "" where nothing
        was put there.
        """
        return self.store.compare_set(name, expected, desired).decode()

    def drop(self, name: str) -> None:
        """Nothing stands there any more."""
        self.store.delete_key(name)

    def meet(self, name: str, waiting: Callable[[], None] = lambda: None) -> None:
        """Return when every rank has come, however late; each name once in a job.

        waiting: called again and again until then.
        """
        self.add(name, 1)
        while self.add(name, 0) < self.world_size:
            waiting()
            time.sleep(_POLL_SECONDS)


_early: list[tuple[Any, int, int]] = []  # the store of a job that has no process group yet
_calls = count()


def told_by_main(value: str) -> str:
    """What rank 0 has as `value`, on every rank, before there is a process group.

    Every rank of a launcher's job calls it, and returns when all have been told. Errors: as of
    `join_job`.
    """
    _early.append(_rendezvous())
    store, rank, world_size = _early[-1]
    store = dist.PrefixStore(f"told/{next(_calls)}", store)
    job = Job(rank=rank, world_size=world_size, id="", store=store)
    if job.is_main:
        job.put("value", value)
    told = job.get("value")
    job.meet("told")  # rank 0 may have the store, and end
    return told


def _rendezvous() -> tuple[Any, int, int]:
    """The launcher's store, rank and world size; once, where rank 0 has the store."""
    if _early:
        return _early.pop()
    allow_open_files(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return next(dist.rendezvous("env://"))


def join_job(device: Device, timeout: timedelta) -> Job:
    """Start the job's process group: the launcher's, or a group of one. Once, on every rank.

    Gloo connects two ranks when they first have something to say to each other, not each with all.
    timeout: of collectives. Errors: `UserError` where the launcher has not set what a rank needs,
    or the system allows too few open files.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # read whenever a group is made
    if is_launched():
        store, rank, world_size = _rendezvous()
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    dist.init_process_group(
        device.backend,
        store=dist.PrefixStore("groups", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return current_job()


def current_job() -> Job:
    """The job whose process group this process is in."""
    store = dist.PrefixStore("job", dist.distributed_c10d._get_default_store())
    first_come = store.compare_set("id", "", uuid4().hex).decode()
    return Job(rank=dist.get_rank(), world_size=dist.get_world_size(), id=first_come, store=store)


def leave_job() -> None:
    """End the job's process groups; quiet where an engine has ended them already."""
    if dist.is_initialized():
        dist.destroy_process_group()
