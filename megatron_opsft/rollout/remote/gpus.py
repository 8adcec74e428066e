"""Which GPUs separate engines take: those of their rank's node behind the training ranks'."""

import os
from dataclasses import dataclass

from megatron_opsft.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRank:
    """A rank and the ranks of its node, which are consecutive."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def of_this_process(cls) -> "NodeRank":
        """As the launcher has set it; without one, the only rank."""
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )

    def neighbours(self) -> range:
        """All ranks of the node."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


def engines_of(rank: int, world_size: int, num_engines: int) -> range:
    """Which separate engines this rank starts and asks; none where there are fewer than ranks and
    none is its own.
    """
    if num_engines > world_size:
        bounds = [-(-r * num_engines // world_size) for r in (rank, rank + 1)]
        return range(*bounds)
    stride = world_size // num_engines
    index = rank // stride
    has_one = rank % stride == 0 and index < num_engines
    return range(index, index + has_one)


def engine_gpus(node: NodeRank, num_engines: int, tp: int, engine: int) -> tuple[int, ...]:
    """The GPUs of one of this rank's engines; rank r of a node trains on GPU r."""
    place = _engines(node, num_engines).index(engine)
    first = node.local_world_size + tp * place
    return tuple(range(first, first + tp))


def check_engine_gpus(node: NodeRank, num_engines: int, tp: int, num_gpus: int) -> None:
    """num_gpus: that torch sees on this node. Errors: `UserError` where they are too few."""
    engines = len(_engines(node, num_engines))
    wanted = node.local_world_size + tp * engines
    if wanted > num_gpus:
        raise UserError(
            f"rollout.placement=separate: {node.local_world_size} training ranks on this node and "
            f"{engines} engines of rollout.tp={tp} need {wanted} GPUs, and torch sees {num_gpus}; "
            "start fewer ranks on each node (torchrun --nproc-per-node, sbatch --ntasks-per-node), "
            "or lower rollout.num_engines or rollout.tp"
        )


def _engines(node: NodeRank, num_engines: int) -> list[int]:
    """Those of the node's ranks."""
    return [e for r in node.neighbours() for e in engines_of(r, node.world_size, num_engines)]
