"""The processes of one job, and a store of counters and values that all of them share.

Needs no Megatron. Unlike a collective, the store lets each rank go at its own pace.
"""

import errno
import os
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any
from uuid import uuid4

import psutil
import torch.distributed as dist

from megatron_opsft.errors import RanksMissing, UserError
from megatron_opsft.records import record
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.launched import (
    RENDEZVOUS,
    STORE_SOCKET,
    count_start,
    is_launched,
    is_on_one_machine,
    launched_rank,
    launched_ranks,
)

_LOOPBACK = "127.0.0.1"
_BACKLOG = 1024  # ranks that may connect at once
# Open files of rank 0, which holds the store. Each rank has a connection, its watchdog has one, and
# gloo at most one. The rest is for libraries, data and logs.
_FILES_OF_A_RANK = 3
_FILES_OF_RANK_0 = 416
_POLL_SECONDS = 0.05
_READ_SECONDS = 1.0  # in which the other ranks read why they must leave
_GET_PATIENCE = timedelta(days=1)  # a rank may be busy; the watchdog notices a dead one
_REFUSE_PATIENCE = timedelta(seconds=30)  # of a rank that reports why it does not start
_SAME_ERROR_SECONDS = 10.0  # in which an error of all ranks reaches each of them

# (rank, host, port) -> store. It stays open: other ranks may still use that of rank 0, in a later
# job.
_launchers_stores: dict[tuple[int, str, str], Any] = {}


@record
class Job:
    """The job that this process is a rank of."""

    rank: int
    world_size: int
    id: str
    """The same on all ranks of the job, and different in every other job."""
    store: Any
    """torch's key-value store, which all ranks share."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def add(self, name: str, amount: int) -> int:
        """Add to the shared counter `name`, which starts at 0, and return its new value."""
        return self.store.add(name, amount)

    def count(self, name: str) -> int:
        """Return the value of the shared counter `name`."""
        return self.store.add(name, 0)

    def put(self, name: str, value: str) -> None:
        """Make the value available to `get` on all ranks."""
        self.store.set(name, value)

    def get(self, name: str) -> str:
        """Wait until some rank has put a value there, and return it."""
        self.store.wait([name], _GET_PATIENCE)
        return self.store.get(name).decode()

    def meet(self, name: str, waiting: Callable[[], None]) -> None:
        """Wait without a time limit until every rank has called this; use each name once in a job.

        waiting: called repeatedly during the wait.
        """
        self.add(name, 1)
        while self.count(name) < self.world_size:
            waiting()
            time.sleep(_POLL_SECONDS)


def join_job(
    device: Device, timeout: timedelta, patience: timedelta | None = None
) -> Job:
    """Start the job's process group: of all ranks that the launcher started, or of this process
    alone. Called by every rank, once for each job that the process does.

    Joining is cheap: Gloo connects two ranks only when they first exchange data. timeout: how long
    a collective may take. patience: how long to wait for ranks that have not joined; by default as
    long as `timeout`. Errors: `UserError` if the launcher has not set the variables of a rank, as
    srun alone does not; `RanksMissing` if the patience ends, or another program has rank 0's port:
    the next start may use another port.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # read whenever a group is made
    # NCCL reads this when it starts. By default it keeps the buffers of captured CUDA graphs
    # registered, and they would point to nothing once a sleeping vLLM has freed that memory.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if is_on_one_machine():
        listen_on_loopback()
    number = count_start()
    rank, world_size = launched_rank(), launched_ranks()
    if is_launched():
        allow_open_files(rank, world_size)
        store = _meet_ranks(rank, world_size, patience or timeout, number)
    else:
        store = dist.HashStore()
    dist.init_process_group(
        device.backend,
        store=dist.PrefixStore("groups", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return current_job()


def allow_open_files(rank: int, world_size: int) -> None:
    """Raise the limit of open files, which include sockets, to the hard limit.

    Errors: `UserError` on rank 0, which holds the store, if that is too low for so many ranks.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_OF_A_RANK * world_size + _FILES_OF_RANK_0
    if rank == 0 and hard != resource.RLIM_INFINITY and needed > hard:
        raise UserError(
            f"rank 0 of {world_size} needs {needed} open files and may have {hard}; raise the hard "
            "limit of open files (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen_on_loopback() -> None:
    """Let gloo and NCCL connect the ranks of this machine over loopback, which no other machine
    reaches, unless the environment names an interface.
    """
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == _LOOPBACK for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def refuse_start(reason: str) -> None:
    """Tell the ranks that join this process's next start that this one does not join, and why."""
    number = count_start()
    if any(name not in os.environ for name in RENDEZVOUS):
        return
    rank = launched_rank()
    with suppress(RanksMissing):  # then no other rank listens
        start = _open_store(rank, number, _REFUSE_PATIENCE)
        start.compare_set("outcome", "", f"rank {rank}: {reason}")


def _meet_ranks(rank: int, world_size: int, patience: timedelta, number: int) -> Any:
    """Wait until every rank has joined, and return the store of this start.

    Errors: `RanksMissing`, the same on all ranks that have joined.
    """
    deadline = time.monotonic() + patience.total_seconds()
    start = _open_store(rank, number, patience)
    try:
        start.append("came", f"{rank} ")
        if start.add("num_came", 1) == world_size:
            start.compare_set("outcome", "", "all")
        # Whichever rank sets the outcome first decides for all: "all", or why the start fails.
        while not start.check(["outcome"]):
            time.sleep(_POLL_SECONDS)
            if time.monotonic() > deadline:
                came = {*map(int, start.get("came").split())}
                late = {*range(world_size)} - came
                more = f" and {len(late) - 1} more" if len(late) > 1 else ""
                message = f"rank {min(late, default=0)}{more} did not join"
                start.compare_set("outcome", "", f"{message} {_within(patience)}")
        outcome = start.get("outcome").decode()
    except dist.DistNetworkError:
        raise RanksMissing("rank 0 ended before all ranks had joined") from None
    if outcome != "all":
        if rank == 0:
            time.sleep(_READ_SECONDS)  # the store may end with this process
        raise RanksMissing(outcome)
    return start


def _within(patience: timedelta) -> str:
    """Return, for example, `within 30 min of the start`."""
    return f"within {patience / timedelta(minutes=1):.4g} min of the start"


def _open_store(rank: int, number: int, patience: timedelta) -> Any:
    """Open the launcher's store; return its keys that belong to the ranks' start of this number.

    Errors: as `join_job`.
    """
    key = rank, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if key not in _launchers_stores:
        _launchers_stores[key] = _connect(rank, patience)
    # torchrun's store may outlive a start of its ranks, and the ranks may start several jobs.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return dist.PrefixStore(f"start{restart}_job{number}", _launchers_stores[key])


def _connect(rank: int, patience: timedelta) -> Any:
    """Connect to the launcher's store, which rank 0 may have to serve. Errors: as `join_job`.

    The store does not ask who connects. If all ranks are on one machine, rank 0 therefore listens
    on loopback alone.
    """
    deadline = time.monotonic() + patience.total_seconds()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = f"{host}:{port}"
    is_served_by_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    is_local = is_served_by_rank_0 and is_on_one_machine()
    if is_local:
        host = _LOOPBACK
    no_answer = f"rank 0 does not answer at {address} {_within(patience)}"
    if rank:
        _wait_for_listener(host, port, deadline, no_answer)
    opened: Future[Any] = Future()

    def open_store() -> None:
        """Make the store, or the error that prevents it, the result of `opened`."""
        try:
            listening = None
            if is_local and rank == 0:
                listening = _listening_socket(port)
            store = dist.TCPStore(
                host,
                port,
                is_master=is_served_by_rank_0 and rank == 0,
                timeout=patience,
                wait_for_workers=False,  # torch's wait does not say which rank is missing
                multi_tenant=True,  # a script's own process group may use it, too
                master_listen_fd=listening,
            )
            opened.set_result(store)
        except Exception as error:
            opened.set_exception(error)

    # PyTorch's call would not return if another program listens there and does not answer.
    Thread(target=open_store, daemon=True).start()
    try:
        return opened.result(max(0.0, deadline - time.monotonic()))
    except (dist.DistError, OSError, TimeoutError) as error:
        message = f"{no_answer}; another program may have this port"
        is_in_use = getattr(error, "errno", None) == errno.EADDRINUSE
        if is_in_use or "EADDRINUSE" in str(error):
            message = f"another program has {address}; change MASTER_PORT"
        raise RanksMissing(message) from None


def _wait_for_listener(host: str, port: int, deadline: float, message: str) -> None:
    """Wait until rank 0 listens; PyTorch's own wait would print a stack trace.

    Errors: `RanksMissing` with the message after the deadline.
    """
    while True:
        with suppress(OSError):
            socket.create_connection((host, port), timeout=10.0).close()
            return
        if time.monotonic() > deadline:
            raise RanksMissing(message)
        time.sleep(_POLL_SECONDS)


def _listening_socket(port: int) -> int:
    """Return the file descriptor of a socket that listens on loopback; the caller closes it.

    `launch local` has opened one already, so that no other program takes the port.
    Errors: `OSError`.
    """
    if inherited := os.environ.get(STORE_SOCKET):
        return int(inherited)
    return socket.create_server((_LOOPBACK, port), backlog=_BACKLOG).detach()


def current_job() -> Job:
    """Return the job whose process group this process is in."""
    store = dist.PrefixStore("job", dist.distributed_c10d._get_default_store())
    # All ranks take the id of the first that comes.
    job_id = store.compare_set("id", "", uuid4().hex).decode()
    return Job(
        rank=dist.get_rank(), world_size=dist.get_world_size(), id=job_id, store=store
    )


def leave_job() -> None:
    """Destroy the job's process groups; does nothing if an engine has destroyed them already."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_abandon() -> bool:
    """True if all ranks of the job call this within a few seconds, as they do after an error that
    all of them have. If one rank fails alone, the others stay in a collective for ever.
    """
    deadline = time.monotonic() + _SAME_ERROR_SECONDS

    def check_deadline() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    # The store may have ended with its rank.
    with suppress(dist.DistError, TimeoutError):
        current_job().meet("abandoning", check_deadline)
        return True
    return False
