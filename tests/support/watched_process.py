"""A process that does nothing but be watched: RANK WORLD_SIZE DIRECTORY BEHAVIOUR RANKS_ON_NODE.

As if so many ranks were on a node. The addresses and the processes are exchanged through files.
Behaviours: `well` waits for what comes; `leave` ends in order; `die`, `stop`, `stuck` and `fail`
are faults. Half a second after the start.
"""

import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from megatron_opsft.runtime.diagnosis import Limits, Process, listeners
from megatron_opsft.runtime.phase import enter_phase
from megatron_opsft.runtime.watchdog import Watchdog, report_failure, this_process

LIMITS = Limits(hang_seconds=4.0, silence_seconds=1.6)


def exchange(directory: Path, me: Process, world_size: int, port: int) -> list[tuple[Process, int]]:
    """Every rank's process and port."""
    rank = me.rank
    mine = directory / f"rank{rank}.partial"
    mine.write_text(json.dumps([asdict(me), port]))
    mine.rename(directory / f"rank{rank}")
    files = [directory / f"rank{other}" for other in range(world_size)]
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    found = [json.loads(file.read_text()) for file in files]
    return [(Process(**process), port) for process, port in found]


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    directory, behaviour = Path(sys.argv[3]), sys.argv[4]
    me = replace(this_process(rank), host=f"node{rank // int(sys.argv[5])}")
    server = socket.create_server(("localhost", 0))
    found = exchange(directory, me, world_size, server.getsockname()[1])
    processes = [process for process, _ in found]
    above = listeners(processes)
    address = ("localhost", found[above[rank]][1])
    listener = server if rank in above.values() else None
    watchdog = Watchdog(processes, me, address, "job", LIMITS, directory, listener)
    enter_phase("rollout", 7)
    time.sleep(0.5)
    if behaviour == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if behaviour == "fail":
        diagnosis = report_failure(3, "not a number")
        if diagnosis is None or diagnosis.rank == rank:
            print("error: not a number", file=sys.stderr)
        os._exit(diagnosis.code if diagnosis else 1)
    if behaviour == "leave":
        watchdog.leave()
        return
    if behaviour == "stuck":
        time.sleep(60)
    enter_phase("train")  # one that is stuck is behind the others
    time.sleep(60)


if __name__ == "__main__":
    main()
