"""Whether so many ranks can hold the model; needs no torch."""

from megatron_opsft.config import ParallelConfig
from megatron_opsft.errors import UserError


def check_world(world_size: int, parallel: ParallelConfig) -> None:
    """Errors: `UserError` for a layout that does not cut so many ranks."""
    if parallel.cp != 1:
        raise UserError(f"parallel.cp={parallel.cp}: context parallelism is not supported; use 1")
    if world_size % (parallel.tp * parallel.pp):
        raise UserError(
            f"world size {world_size} is not a multiple of parallel.tp x parallel.pp = "
            f"{parallel.tp} x {parallel.pp}; start {parallel.tp * parallel.pp} (or a multiple) "
            "ranks with torchrun --nproc-per-node"
        )
