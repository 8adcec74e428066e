"""The processes of one job, and a store of counters and values that all of them see.

Needs no Megatron. Unlike a collective, the store lets ranks go at their own pace.
"""

import errno
import os
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any
from uuid import uuid4

import psutil
import torch.distributed as dist

from megatron_opsft.errors import RanksMissing, UserError
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.launched import (
    RENDEZVOUS,
    STORE_SOCKET,
    count_start,
    is_launched,
    is_on_one_machine,
)

_LOOPBACK = "127.0.0.1"
_BACKLOG = 1024  # ranks that come at once
# Of rank 0, which holds the store: each rank has a connection for itself and one for its watchdog,
# and gloo one at most; libraries, data and logs have the others.
_FILES_OF_A_RANK, _OTHER_FILES = 3, 416
_POLL_SECONDS = 0.05
_HEAR_SECONDS = 1.0  # for the others to read why they are to leave
_PATIENCE = timedelta(days=1)  # with a rank that is busy; one that is dead ends the job
_REFUSE_PATIENCE = timedelta(
    seconds=30
)  # of a rank that does not start, to tell the others so
_SAME_ERROR_SECONDS = 10.0  # within which an error of all ranks has reached all of them

# By rank and address. It stays open: rank 0 may hold it for the others, who may be in a later job.
_launchers_stores: dict[tuple[str, str, str], Any] = {}


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
        """Make the value available to `get` on all ranks."""
        self.store.set(name, value)

    def get(self, name: str) -> str:
        """What some rank has put or will put there."""
        self.store.wait([name], _PATIENCE)
        return self.store.get(name).decode()

    def meet(self, name: str, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until every rank has called it, however late; use each name once in a job.

        waiting: called again and again until then.
        """
        self.add(name, 1)
        while self.add(name, 0) < self.world_size:
            waiting()
            time.sleep(_POLL_SECONDS)


def join_job(
    device: Device, timeout: timedelta, patience: timedelta | None = None
) -> Job:
    """Start the job's process group: the launcher's, or a group of one. Called by every rank, again
    when the job before has ended.

    Gloo connects two ranks when they first have something to say to each other, not each with all.
    timeout: of collectives. patience: with ranks that have not come yet; by default the same.
    Errors: `UserError` where the launcher has not set what a rank needs, or SLURM's srun is none;
    `RanksMissing` where the patience ends, or another program has rank 0's port: the next start may
    take another.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # read whenever a group is made
    # NCCL reads this when it starts. By default it keeps the buffers of captured CUDA graphs
    # registered; where a sleeping vLLM has given that memory back they would point to nothing.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if is_on_one_machine():
        listen_on_loopback()
    number = count_start()
    if is_launched():
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        allow_open_files(rank, world_size)
        store = _meet_ranks(rank, world_size, patience or timeout, number)
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


def allow_open_files(rank: int, world_size: int) -> None:
    """Take as many open files as the hard limit allows: sockets are files. Errors: `UserError` on
    rank 0, which holds the store, where that is too few for so many ranks.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_OF_A_RANK * world_size + _OTHER_FILES
    if rank == 0 and hard != resource.RLIM_INFINITY and needed > hard:
        raise UserError(
            f"rank 0 of {world_size} needs {needed} open files and may have {hard}; raise the hard "
            "limit of open files (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen_on_loopback() -> None:
    """Let gloo and NCCL connect the ranks of this machine where no other machine reaches them,
    unless the environment names an interface.
    """
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == _LOOPBACK for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def refuse_start(reason: str) -> None:
    """Tell the ranks that come to this process's next start that this one does not, and why."""
    number = count_start()
    if any(name not in os.environ for name in RENDEZVOUS):
        return
    deadline = time.monotonic() + _REFUSE_PATIENCE.total_seconds()
    with suppress(RanksMissing):  # nobody is there to be told
        store = _open_store(
            int(os.environ["RANK"]), _REFUSE_PATIENCE, deadline, "in time"
        )
        said = f"rank {os.environ['RANK']}: {reason}"
        _part_of_start(store, number).compare_set("outcome", "", said)


def _part_of_start(store: Any, number: int) -> Any:
    """The part of the launcher's store that the ranks' start of this number has for itself."""
    # torchrun's store may outlive a start of its ranks, and the ranks may start several jobs.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return dist.PrefixStore(f"start{restart}_job{number}", store)


def _meet_ranks(rank: int, world_size: int, patience: timedelta, number: int) -> Any:
    """This start's part of the launcher's store when every rank has come to it. Errors:
    `RanksMissing`, the same on all that have come.
    """
    within = f"within {patience / timedelta(minutes=1):.4g} min of the start"
    deadline = time.monotonic() + patience.total_seconds()
    store = _open_store(rank, patience, deadline, within)
    start = _part_of_start(store, number)
    try:
        start.append("came", f"{rank} ")
        if start.add("num_came", 1) == world_size:
            start.compare_set("outcome", "", "all")
        while not start.check(["outcome"]):
            time.sleep(_POLL_SECONDS)
            if time.monotonic() > deadline:
                late = {*range(world_size)} - {*map(int, start.get("came").split())}
                more = f" and {len(late) - 1} more" if len(late) > 1 else ""
                said = f"rank {min(late, default=0)}{more} did not join {within}"
                start.compare_set("outcome", "", said)
        outcome = start.get("outcome").decode()
    except dist.DistNetworkError:
        raise RanksMissing("rank 0 ended before all ranks had joined") from None
    if outcome != "all":
        if rank == 0:
            time.sleep(_HEAR_SECONDS)  # the store may be in this process
        raise RanksMissing(outcome)
    return start


def _open_store(rank: int, patience: timedelta, deadline: float, within: str) -> Any:
    """The launcher's store, which may be in rank 0. Errors: as `join_job`.

    The store asks nobody who they are. Where all ranks are on one machine, rank 0's listens there
    alone.
    """
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    is_ours = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    is_local = is_ours and is_on_one_machine()
    place = f"{host}:{port}"
    if is_local:
        host = _LOOPBACK
    if known := _launchers_stores.get((str(rank), host, port)):
        return known
    silent = f"rank 0 does not answer at {place} {within}"
    while rank:  # until somebody listens; PyTorch would print a stack
        with suppress(OSError):
            socket.create_connection((host, int(port)), timeout=10.0).close()
            break
        if time.monotonic() > deadline:
            raise RanksMissing(silent)
        time.sleep(_POLL_SECONDS)
    opened: Future[Any] = Future()

    def open_store() -> None:
        try:
            listening = _listening_socket(int(port)) if is_local and rank == 0 else None
            store = dist.TCPStore(
                host,
                int(port),
                is_master=is_ours and rank == 0,
                timeout=patience,
                wait_for_workers=False,  # it could not say for whom it waits
                multi_tenant=True,  # a script's own process group may have it, too
                master_listen_fd=listening,
            )
            opened.set_result(store)
        except Exception as error:
            opened.set_exception(error)

    # Where another program listens and says nothing, PyTorch's call would not return.
    Thread(target=open_store, daemon=True).start()
    try:
        store = opened.result(max(0.0, deadline - time.monotonic()))
    except (dist.DistError, OSError, TimeoutError) as error:
        taken = f"another program has {place}; change MASTER_PORT"
        unknown = f"{silent}; another program may have this port"
        is_taken = (
            "EADDRINUSE" in str(error) or getattr(error, "errno", 0) == errno.EADDRINUSE
        )
        raise RanksMissing(taken if is_taken else unknown) from None
    _launchers_stores[str(rank), host, port] = store
    return store


def _listening_socket(port: int) -> int:
    """The number of a socket that listens on loopback; whoever gets it closes it. `launch local`
    has opened one already, so that no other program takes the port. Errors: `OSError`.
    """
    if given := os.environ.get(STORE_SOCKET):
        return int(given)
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((_LOOPBACK, port))
    server.listen(_BACKLOG)
    return server.detach()


def current_job() -> Job:
    """The job whose process group this process is in."""
    store = dist.PrefixStore("job", dist.distributed_c10d._get_default_store())
    first_come = store.compare_set("id", "", uuid4().hex).decode()
    return Job(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        id=first_come,
        store=store,
    )


def leave_job() -> None:
    """End the job's process groups; quiet where an engine has ended them already."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_abandon() -> bool:
    """Whether all ranks of the job call this within a moment: their error is the same. A rank that
    fails alone leaves the others in a collective for ever.
    """
    job = current_job()
    deadline = time.monotonic() + _SAME_ERROR_SECONDS
    with suppress(dist.DistError):  # the store has gone with its rank
        job.add("abandoning", 1)
        while job.add("abandoning", 0) < job.world_size:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True
    return False
