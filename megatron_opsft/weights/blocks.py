"""The ranks of a reshard in equal blocks, each of which holds all that its ranks want.

In a large job the same happens many times: of every kind of rank (what it holds, what it wants)
there are many. As many blocks are made as all these numbers can be divided by; a block then has
equally many ranks of each kind, so one schedule does for all, its load is as even as one of all
ranks could be, and a rank has partners in its own block alone. Pure, and the same on every rank.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import numpy as np
from numpy.typing import NDArray

from megatron_opsft.weights.reshard import Placement

Members = NDArray[np.int64]
"""[blocks, members]: global ranks. A member's number is its place in its block; members of the same
number hold and want the same.
"""


def split_into_blocks(sources: Sequence[Placement], targets: Sequence[Placement]) -> Members:
    """All ranks of the placements; neighbours come into one block, as far as their kinds allow.

    sources, targets: no rank is in two placements of the same side.
    """
    holding = {rank: number for number, held in enumerate(sources) for rank in held.ranks}
    wanting = {rank: number for number, held in enumerate(targets) for rank in held.ranks}
    kinds: dict[tuple[int | None, int | None], list[int]] = {}
    for rank in sorted(holding.keys() | wanting.keys()):
        kinds.setdefault((holding.get(rank), wanting.get(rank)), []).append(rank)
    num_blocks = gcd(*map(len, kinds.values())) or 1
    columns = [np.array(ranks).reshape(num_blocks, -1) for ranks in kinds.values()]
    return np.concatenate([np.zeros((num_blocks, 0), np.int64), *columns], axis=1)


def within_block(placements: Sequence[Placement], members: Members) -> list[Placement]:
    """The placements of one block, their ranks by number; the same for every block."""
    number_of = {rank: number for number, rank in enumerate(members[0].tolist())}
    return [
        replace(
            placement,
            ranks=tuple(number_of[rank] for rank in placement.ranks if rank in number_of),
        )
        for placement in placements
    ]
