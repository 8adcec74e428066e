"""How many verifier processes a rank may have."""

import os

MAX_WORKERS = 32


def share_of_cores(num_local_ranks: int) -> int:
    """Workers of a rank when `verify.workers` is 0: its share of the usable CPU cores.

    The ranks of a node share what this process may use, but where SLURM gave each task its own.
    """
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    if _has_own_cores(usable):
        num_local_ranks = 1
    return max(1, min(MAX_WORKERS, usable // num_local_ranks))


def _has_own_cores(usable: int) -> bool:
    """Whether this rank is a SLURM task that is bound to cores of its own.

    A task that is bound has SLURM_CPUS_PER_TASK of them, and perhaps the sibling of an odd one; one
    that is not has those of all tasks. Ranks that torchrun started share the cores of its task.
    """
    per_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if not per_task.isdecimal() or "TORCHELASTIC_RUN_ID" in os.environ:
        return False
    return usable < 2 * int(per_task)
