"""The watchdog of a job whose process group is there: who listens where, and to whom."""

import contextlib
import ipaddress
import os
import socket
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from megatron_opsft.runtime.diagnosis import Limits, listeners
from megatron_opsft.runtime.distributed import broadcast_object, gather_from_all
from megatron_opsft.runtime.watchdog import Watchdog, this_process


def start_watchdog(limits: Limits, directory: Path) -> Watchdog:
    """Let the ranks watch each other from now on. Collective over the world.

    directory: the run's, for the ranks to agree who speaks when rank 0 cannot.
    """
    me = this_process(dist.get_rank())
    processes = gather_from_all([me])
    above = listeners(processes)
    # Rank 0 listens where the others know its node; who listens to one node alone, in it.
    host = os.environ.get("MASTER_ADDR", "localhost")
    listener = None
    if me.rank == 0:
        listener = open_listener(host, one_node=len({process.host for process in processes}) == 1)
    elif me.rank in above.values():
        listener = open_listener("localhost", one_node=True)
    ports = gather_from_all([listener.getsockname()[1] if listener else 0])
    token = broadcast_object(uuid4().hex)
    address = (host if above[me.rank] == 0 else "localhost", ports[above[me.rank]])
    return Watchdog(processes, me, address, token, limits, directory, listener)


def open_listener(host: str, *, one_node: bool) -> socket.socket:
    """Listens at the address by which the other ranks know this machine, and at no other.

    At all of them only where `host` is not this machine's own address, as behind some containers'
    networks, or where several nodes know it by a name that means loopback here.
    """
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        if one_node or not ipaddress.ip_address(address[0]).is_loopback:
            return socket.create_server(address, family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
