"""What tells a process from a later one of its number, whatever happens to the machine's clock."""

from contextlib import suppress
from pathlib import Path

import psutil

_STATE, _START = 0, 19  # of the fields behind the name (proc_pid_stat(5))


def started_at(pid: int) -> float | None:
    """Of a living process: ticks from the machine's start to its own; where the system has no
    /proc, seconds since the epoch. None for one that has ended.
    """
    stat = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        with suppress(psutil.Error):
            return psutil.Process(pid).create_time()
        return None
    with suppress(OSError):
        fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[_STATE] == "Z" else float(fields[_START])
    return None
