"""What has to go from which ranks to which: the parts of a reshard's sources and targets, cut at
each other's edges.

In a large job the same happens many times: of every kind of rank (what it holds, what it wants)
there are many. The ranks are split into as many blocks as all these counts can be divided by. A
block then has equally many ranks of each kind, it holds all that its ranks want, and a rank has
partners in its own block alone. Pure: every rank of a block finds the same routes in the same
order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from megatron_opsft.models.weights.rectangles import Copy, Parameter, Rect


@dataclass(frozen=True, slots=True)
class Placement:
    """Global ranks that all hold exactly these parameters."""

    ranks: tuple[int, ...]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """Copies whose source the same ranks hold, and whose target the same ranks want.

    holders, wanting: global ranks; a rank may be in both.
    copies: from rectangles of HF tensors, each inside one part of every holder, to parameters.
    """

    holders: tuple[int, ...]
    wanting: tuple[int, ...]
    copies: tuple[Copy, ...]

    @property
    def receivers(self) -> tuple[int, ...]:
        """Who wants the values and does not hold them."""
        return tuple(rank for rank in self.wanting if rank not in self.holders)

    @property
    def local(self) -> tuple[int, ...]:
        """Who wants the values and holds them."""
        return tuple(rank for rank in self.wanting if rank in self.holders)


def split_into_blocks(
    sources: Sequence[Placement], targets: Sequence[Placement]
) -> list[frozenset[int]]:
    """All ranks of the placements in blocks; neighbours share one, as far as their kinds allow.

    sources, targets: every rank is in one placement of each side.
    """
    holding = {
        rank: index for index, placed in enumerate(sources) for rank in placed.ranks
    }
    wanting = {
        rank: index for index, placed in enumerate(targets) for rank in placed.ranks
    }
    kinds: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(holding):
        kinds.setdefault((holding[rank], wanting[rank]), []).append(rank)
    num_blocks = gcd(*map(len, kinds.values()))
    blocks: list[set[int]] = [set() for _ in range(num_blocks)]
    for ranks in kinds.values():
        for position, rank in enumerate(ranks):
            blocks[position * num_blocks // len(ranks)].add(rank)
    return [frozenset(block) for block in blocks]


def find_routes(
    sources: Sequence[Placement], targets: Sequence[Placement]
) -> tuple[Route, ...]:
    """All routes of a reshard.

    Rectangles of the sources are equal or apart. Errors: ValueError, naming the tensor, where they
    leave out something that a target wants.
    """
    held = _held_rects(sources)
    routes: dict[tuple[tuple[int, ...], int], list[Copy]] = {}
    for index, target in enumerate(targets):
        for parameter in target.parameters:
            for part in parameter.parts:
                missing = part.source.num_elements
                for rect, holding in held.get(part.source.tensor, {}).items():
                    copy = part.cut(rect)
                    if copy is not None:
                        routes.setdefault((tuple(holding), index), []).append(copy)
                        missing -= copy.source.num_elements
                if missing:
                    raise ValueError(f"the sources do not hold all of {part.source}")
    return tuple(
        Route(
            holders=tuple(rank for i in holding for rank in sources[i].ranks),
            wanting=targets[index].ranks,
            copies=tuple(copies),
        )
        for (holding, index), copies in routes.items()
    )


def _held_rects(sources: Sequence[Placement]) -> dict[str, dict[Rect, list[int]]]:
    """HF name -> its distinct rectangles -> the indices of the placements that hold them."""
    held: dict[str, dict[Rect, list[int]]] = {}
    for index, placement in enumerate(sources):
        for parameter in placement.parameters:
            for part in parameter.parts:
                rects = held.setdefault(part.source.tensor, {})
                holding = rects.setdefault(part.source, [])
                if index not in holding[-1:]:
                    holding.append(index)
    return held
