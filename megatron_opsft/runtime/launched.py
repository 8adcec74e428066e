"""What the launcher has told this process about the job that it is a rank of.

Imports no torch: a start is checked before anything is loaded.
"""

import os

from megatron_opsft.errors import UserError

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets them
STORE_SOCKET = (
    "OPSFT_STORE_SOCKET"  # `launch local` gives rank 0 the job's listening socket
)
# How many processes Open MPI, MPICH and Intel's (PMI), or MVAPICH have started.
_SIZES_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_FIRST_SPECIAL_STEP = (
    0xFFFFFFF0  # SLURM's batch and interactive steps: one process each
)

_num_starts = 0


def is_launched() -> bool:
    """Whether this process is a rank of several. Errors: `UserError` where that is not clear."""
    missing = [name for name in RENDEZVOUS if name not in os.environ]
    if {"RANK", "WORLD_SIZE"} <= {*missing}:
        _check_not_one_of_several_tasks()
        return False
    if missing:
        raise UserError(
            f"the launcher has not set {', '.join(missing)}; a rank needs {', '.join(RENDEZVOUS)} "
            "(torchrun sets them)"
        )
    return True


def is_on_one_machine() -> bool:
    """Whether all ranks of the job are on this machine, as far as the launcher says: it has set
    LOCAL_WORLD_SIZE, or the job's address is the machine's own for itself. One process is.
    """
    if "WORLD_SIZE" not in os.environ:
        return True
    host = os.environ.get("MASTER_ADDR", "")
    is_loopback = host in ("localhost", "::1") or host.startswith("127.")
    return is_loopback or os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def _check_not_one_of_several_tasks() -> None:
    """`UserError` for each task of a step of SLURM's, and for each process of mpirun's: without
    ranks, every one would do all the work alone, in one directory.
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
    """The tasks of the step that this process belongs to; 1 outside of srun's steps. SLURM_NTASKS
    alone says nothing: a batch script has it too, and runs once.
    """
    step = os.environ.get("SLURM_STEP_ID", "")
    is_of_srun = step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
    of_job = os.environ.get("SLURM_NTASKS", "1") if is_of_srun else "1"
    told = os.environ.get("SLURM_STEP_NUM_TASKS", of_job)
    return int(told) if told.isdecimal() else 1


def count_start() -> int:
    """The number of this process's next start of a job, from 0. All ranks have the same: each
    call of `train` or `evaluate` that needs a job is one start, on every rank.
    """
    global _num_starts
    _num_starts += 1
    return _num_starts - 1


def num_starts() -> int:
    """The starts that this process has counted."""
    return _num_starts
