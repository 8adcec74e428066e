"""How many files and sockets this process may have open, and how many a rank of a job needs."""

import resource

from megatron_opsft.errors import UserError

_OWN = 320  # libraries, engine, verifiers, listeners of Megatron's groups, with room to spare
_PER_DOUBLING = 8  # connections of collectives that go by powers of two


def allow_open_files(rank: int, world_size: int) -> None:
    """Raise the limit of open files as far as the system lets this process; before it joins a job.

    Errors: `UserError` where that is too few for this rank.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = needed_files(rank, world_size)
    if world_size > 1 and hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"rank {rank} of {world_size} needs {needed} open files and may have {hard}: raise the "
            f"hard limit to {needed} before the ranks start (ulimit -Hn; LimitNOFILE of a service; "
            "--ulimit nofile of a container)"
        )


def needed_files(rank: int, world_size: int) -> int:
    """How many are open at once at most. Rank 0 holds the store, with a connection of each rank and
    one of its watchdog, and each rank tells it what it writes of a checkpoint.
    """
    own = _OWN + _PER_DOUBLING * (world_size - 1).bit_length()
    return own if rank else own + 3 * world_size
