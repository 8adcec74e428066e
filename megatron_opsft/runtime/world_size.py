"""Whether so many ranks can hold the model; needs no torch."""

from megatron_opsft.config import ParallelConfig
from megatron_opsft.errors import UserError


def check_world(world_size: int, parallel: ParallelConfig) -> None:
    """Errors: `UserError` for a layout that does not cut so many ranks."""
    if world_size % parallel.replica_size:
        raise UserError(
            f"world size {world_size} is not a multiple of {parallel.replica}; start "
            f"{parallel.replica_size} (or a multiple) ranks with torchrun --nproc-per-node"
        )
    if parallel.ep == 1:
        return
    experts = parallel.expert_tp * parallel.ep * parallel.pp
    if world_size % experts:
        raise UserError(
            f"world size {world_size} is not a multiple of the {experts} ranks that hold all "
            f"experts (etp x ep x pp = {parallel.expert_tp} x {parallel.ep} x {parallel.pp}); "
            "lower parallel.ep or start more ranks"
        )
