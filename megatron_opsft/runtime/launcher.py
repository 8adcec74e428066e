"""A rank's place in its job, as launchers put it into the environment, and whether that many ranks
can hold the model.

The usual variables are torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. Imports no torch.
"""

import os
from collections.abc import Mapping

from megatron_opsft.config import ParallelConfig
from megatron_opsft.errors import UserError

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# What others call them: Open MPI's mpirun, MPICH's and Intel's (Hydra), srun.
_OTHERS = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def usual_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The usual variables that are to be set: those of another launcher's that lack.

    None where there are some, or no MASTER_ADDR: an srun or sbatch around a run of one process does
    not make it one of many.
    """
    if "RANK" in environment or "MASTER_ADDR" not in environment:
        return {}
    for names in _OTHERS:
        if names[0] in environment and names[1] in environment:
            pairs = zip(_NAMES, names, strict=True)
            return {usual: environment[name] for usual, name in pairs if name in environment}
    return {}


def is_launched() -> bool:
    """Whether this process is a rank of several. Errors: `UserError` where that is not clear."""
    missing = [name for name in RENDEZVOUS if name not in os.environ]
    if {"RANK", "WORLD_SIZE"} <= {*missing}:
        return False
    if missing:
        raise UserError(
            f"the launcher has not set {', '.join(missing)}; a rank needs {', '.join(RENDEZVOUS)} "
            "(torchrun sets them)"
        )
    return True


def check_world(world_size: int, parallel: ParallelConfig, option: str = "world size") -> None:
    """Errors: `UserError` for a layout that this number of ranks cannot hold.

    option: what the error calls the number.
    """
    if world_size % parallel.replica_size:
        raise UserError(
            f"{option} {world_size} is not a multiple of {parallel.replica}; start "
            f"{parallel.replica_size} (or a multiple) ranks with torchrun --nproc-per-node"
        )
    if parallel.ep == 1:
        return
    experts = parallel.expert_tp * parallel.ep * parallel.pp
    if world_size % experts:
        raise UserError(
            f"{option} {world_size} is not a multiple of the {experts} ranks that hold all "
            f"experts (etp x ep x pp = {parallel.expert_tp} x {parallel.ep} x {parallel.pp}); "
            "lower parallel.ep or start more ranks"
        )
