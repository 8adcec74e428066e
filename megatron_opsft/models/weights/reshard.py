"""Find which values have to go from which ranks to which when weights change from one layout
(the sources) to another (the targets).

Large jobs repeat one pattern: many ranks hold the same and want the same. So the ranks are split
into identical blocks, as many as the number of ranks of every kind (what a rank holds, what it
wants) can be divided by. A block holds all that its ranks want, so ranks exchange weights only
within their own block. Only names and numbers: every rank of a block finds the same copies in the
same order.
"""

from collections.abc import Collection, Iterator, Sequence
from math import gcd
from typing import NamedTuple

from megatron_opsft.models.weights.rectangles import Copy, Parameter, Rect

Ranks = tuple[int, ...]
"""Global ranks."""


class Placement(NamedTuple):
    """Ranks that all hold exactly the same parameters."""

    ranks: Ranks
    parameters: tuple[Parameter, ...]

    def copies(self) -> Iterator[Copy]:
        """Yield all copies from HF tensors to the parameters."""
        for parameter in self.parameters:
            yield from parameter.copies


def split_into_blocks(
    sources: Sequence[Placement], targets: Sequence[Placement]
) -> list[frozenset[int]]:
    """Split all ranks into blocks; neighbours share one, as far as their kinds allow.

    sources, targets: every rank is in one placement of each.
    """
    kinds = []  # the ranks of each kind: they hold the same and want the same
    for source in sources:
        held_by = set(source.ranks)
        for target in targets:
            ranks = sorted(held_by.intersection(target.ranks))
            if ranks:
                kinds.append(ranks)
    num_blocks = gcd(*map(len, kinds))
    blocks: list[set[int]] = [set() for _ in range(num_blocks)]
    for ranks in kinds:
        for position, rank in enumerate(ranks):
            blocks[position * num_blocks // len(ranks)].add(rank)
    return [frozenset(block) for block in blocks]


def restrict(
    placements: Sequence[Placement], block: Collection[int]
) -> list[Placement]:
    """Return what the ranks of a block hold."""
    restricted = []
    for placement in placements:
        ranks = tuple(rank for rank in placement.ranks if rank in block)
        if ranks:
            restricted.append(Placement(ranks, placement.parameters))
    return restricted


def find_copies(
    sources: Sequence[Placement], targets: Sequence[Placement]
) -> dict[tuple[Ranks, Ranks], list[Copy]]:
    """Find all copies that fill the target parameters.

    Returns (ranks that all hold the sources, ranks that all want the targets) -> copies from
    rectangles of HF tensors to target parameters. A rank may both hold and want. Each rectangle
    lies within one stored rectangle of every holder, so that any holder can send it from one
    parameter.

    Any two rectangles of the sources must be equal or disjoint. Errors: ValueError, naming the
    tensor, if the sources lack something that a target wants.
    """
    holders_of = _holders_by_rect(sources)
    copies: dict[tuple[Ranks, Ranks], list[Copy]] = {}
    for target in targets:
        for wanted in target.copies():
            num_missing = wanted.source.num_elements
            for rect, holders in holders_of.get(wanted.source.tensor, {}).items():
                copy = wanted.cut(rect)
                if copy is not None:
                    copies.setdefault((holders, target.ranks), []).append(copy)
                    num_missing -= copy.source.num_elements
            if num_missing:
                raise ValueError(f"the sources do not hold all of {wanted.source}")
    return copies


def _holders_by_rect(sources: Sequence[Placement]) -> dict[str, dict[Rect, Ranks]]:
    """Map HF name -> each distinct rectangle of it -> the ranks that hold it."""
    holders_of: dict[str, dict[Rect, Ranks]] = {}
    for placement in sources:
        for copy in placement.copies():
            rects = holders_of.setdefault(copy.source.tensor, {})
            holders = rects.get(copy.source, ())
            # A placement may have the same rectangle in several parameters.
            if placement.ranks[0] not in holders:
                rects[copy.source] = holders + placement.ranks
    return holders_of
