"""Reads what the launcher has set in this process's environment about its job.

Imports no torch: a start is checked before anything is loaded.
"""

import os

from megatron_opsft.errors import UserError

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets them
# `launch local` sets it for rank 0: the file descriptor of the job's listening socket.
STORE_SOCKET = "OPSFT_STORE_SOCKET"
# Number of processes that Open MPI, MPICH and Intel MPI (PMI), or MVAPICH have started.
_SIZES_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# From here on: SLURM's batch and interactive steps, which have one process each.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

_num_starts = 0


def is_launched() -> bool:
    """True if a launcher has started this process as a rank. Errors: `UserError` if it has set
    only some of the variables, or started several processes without ranks.
    """
    missing = [name for name in RENDEZVOUS if name not in os.environ]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        _check_not_one_of_several_tasks()
        return False
    if missing:
        raise UserError(
            f"the launcher has not set {', '.join(missing)}; a rank needs {', '.join(RENDEZVOUS)} "
            "(torchrun sets them)"
        )
    return True


def launched_rank() -> int:
    """Return this process's rank, also before it has joined its job; 0 if it was not launched."""
    return int(os.environ.get("RANK", "0"))


def launched_ranks() -> int:
    """Return the number of ranks of this process's job; 1 if it was not launched."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_on_this_machine() -> int:
    """Return the number of ranks of the job on this machine; all of them if it is not told."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", launched_ranks()))


def is_on_one_machine() -> bool:
    """True if all ranks of the job are on this machine, as far as the launcher tells: it has set
    LOCAL_WORLD_SIZE, or the job's address is loopback. Always true for a single process.
    """
    if "WORLD_SIZE" not in os.environ:
        return True
    host = os.environ.get("MASTER_ADDR", "")
    is_loopback = host in ("localhost", "::1") or host.startswith("127.")
    return is_loopback or os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def _check_not_one_of_several_tasks() -> None:
    """Errors: `UserError` if this is one of several tasks of srun or processes of mpirun. Without
    ranks, each of them would do all the work alone, in the same directory.
    """
    num_tasks = _num_tasks_of_step()
    if num_tasks > 1:
        raise UserError(
            f"srun has started {num_tasks} tasks, and nothing has told them their RANK and "
            "WORLD_SIZE; start one task per node with torchrun (srun --ntasks-per-node=1 torchrun "
            "...), or let `megatron-opsft launch slurm` write and submit the job"
        )
    for name in _SIZES_OF_MPI:
        size = os.environ.get(name, "")
        if size.isdecimal() and int(size) > 1:
            raise UserError(
                f"mpirun has started {size} processes ({name}), and nothing has told them their "
                "RANK and WORLD_SIZE; start one process per node with torchrun (mpirun --npernode "
                "1 torchrun ...), or let `megatron-opsft launch slurm` write and submit the job"
            )


def _num_tasks_of_step() -> int:
    """Return the number of tasks of this process's SLURM step; 1 outside of srun's steps.

    SLURM_NTASKS does not tell alone: a batch script has it too, and runs once.
    """
    step = os.environ.get("SLURM_STEP_ID", "")
    is_of_srun = step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
    tasks_of_job = os.environ.get("SLURM_NTASKS", "1") if is_of_srun else "1"
    num_tasks = os.environ.get("SLURM_STEP_NUM_TASKS", tasks_of_job)
    return int(num_tasks) if num_tasks.isdecimal() else 1


def count_start() -> int:
    """Count one more start of a job, and return its number, from 0. All ranks get the same number,
    because each call of `train` or `evaluate` that needs a job starts one on every rank.
    """
    global _num_starts
    _num_starts += 1
    return _num_starts - 1


def num_starts() -> int:
    """Return how many starts this process has counted."""
    return _num_starts
