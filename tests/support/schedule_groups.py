"""Which tests follow each other on one worker of pytest-xdist."""

from pathlib import PurePath
from typing import Any

from xdist.scheduler import LoadScopeScheduling

# In vLLM's folder: what needs none of the folder's ranks, but processes of its own.
_OWN_PROCESSES = ("test_cpu_worker_apart.py", "test_defaults.py", "test_cpu_kernels.py")


class GroupScheduling(LoadScopeScheduling):
    """A folder's tests are one group where its tests share what takes long to start: in vLLM's the
    ranks also spin while they wait for each other, so one at a time. Elsewhere a group is a file.

    xdist's own groups are part of a test's name, which pytest 9.2 does not let it change.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = PurePath(nodeid.split("::", 1)[0])
        shared = file.parent.name in ("vllm", "slurm", "browser")
        return str(file.parent if shared and file.name not in _OWN_PROCESSES else file)


def scheduling(config: Any, log: Any) -> GroupScheduling | None:
    """For `--dist loadgroup`."""
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None
