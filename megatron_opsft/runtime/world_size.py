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
