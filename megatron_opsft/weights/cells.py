"""What has to go from whom to whom: the rectangles of a reshard's sources and targets, intersected.

A cell is a rectangle of an HF tensor that lies in one rectangle of the sources and in one part of
one target parameter. Pure: every rank finds the same cells in the same order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_opsft.weights.layouts import Holding, Parameter, Part, Rect, Slice, locate


@dataclass(frozen=True, slots=True)
class Cell:
    """rect: of an HF tensor; source: number of the source rectangle around it.

    parameter, part: of the target, where it belongs.
    """

    rect: Rect
    source: int
    parameter: str
    part: Part

    def target(self, rect: Rect) -> Slice:
        """Where `rect`, which lies inside the cell, goes."""
        return locate(self.parameter, self.part, rect)


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that the same ranks hold and the same ranks want.

    holders, wanting: global ranks, ascending; a rank may be in both.
    """

    holders: tuple[int, ...]
    wanting: tuple[int, ...]
    cells: tuple[Cell, ...]

    @property
    def receivers(self) -> tuple[int, ...]:
        """Who wants the cells and does not hold them."""
        return tuple(rank for rank in self.wanting if rank not in self.holders)

    @property
    def local(self) -> tuple[int, ...]:
        """Who wants the cells and holds them."""
        return tuple(rank for rank in self.wanting if rank in self.holders)

    @property
    def num_elements(self) -> int:
        """Of all cells."""
        return sum(cell.rect.num_elements for cell in self.cells)


class Sources:
    """All distinct rectangles in the source holdings, numbered, and where each holding has them."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        """Errors: ValueError where rectangles of one tensor overlap without being equal."""
        self._number_of_rank = {rank: n for n, h in enumerate(holdings) for rank in h.ranks}
        self._places: list[dict[int, tuple[str, Part]]] = [{} for _ in holdings]
        self._by_name: dict[str, dict[Rect, int]] = {}
        holders: list[list[int]] = []
        for number, holding in enumerate(holdings):
            for parameter in holding.parameters:
                for part in parameter.parts:
                    rects = self._by_name.setdefault(part.hf_name, {})
                    source = rects.setdefault(part.rect, len(holders))
                    if source == len(holders):
                        holders.append([])
                    if source not in self._places[number]:
                        self._places[number][source] = (parameter.name, part)
                        holders[source].append(number)
        self.holders = [tuple(numbers) for numbers in holders]
        for hf_name, rects in self._by_name.items():
            _check_disjoint(hf_name, rects)

    def covering(self, part: Part) -> list[tuple[int, Rect]]:
        """The source rectangles that make up a target part, each cut to it.

        Errors: ValueError where they leave something out.
        """
        found = []
        for rect, source in self._by_name.get(part.hf_name, {}).items():
            common = part.rect.intersect(rect)
            if common is not None:
                found.append((source, common))
        if sum(rect.num_elements for _, rect in found) != part.rect.num_elements:
            raise ValueError(f"the sources do not hold all of {part.hf_name} {part.rect}")
        return found

    def locate(self, cell: Cell, rect: Rect, rank: int) -> Slice:
        """Where a holder of the cell has `rect`, which lies inside it."""
        name, part = self._places[self._number_of_rank[rank]][cell.source]
        return locate(name, part, rect)


def _check_disjoint(hf_name: str, rects: Iterable[Rect]) -> None:
    """ValueError if two of these distinct rectangles overlap."""
    above: list[Rect] = []
    for rect in sorted(rects, key=lambda rect: (rect.row0, rect.col0)):
        above = [other for other in above if other.row1 > rect.row0]
        if any(rect.intersect(other) for other in above):
            raise ValueError(f"the sources hold overlapping parts of {hf_name}")
        above.append(rect)


def find_groups(
    holdings: Sequence[Holding], sources: Sources, targets: Sequence[Holding]
) -> tuple[Group, ...]:
    """All cells. holdings: those behind `sources`. Errors: ValueError as `Sources.covering`, and
    for a target parameter that its own parts do not fill.
    """
    cells: dict[tuple[tuple[int, ...], int], list[Cell]] = {}
    for number, target in enumerate(targets):
        for parameter in target.parameters:
            _check_filled(parameter)
            for part in parameter.parts:
                for source, rect in sources.covering(part):
                    cell = Cell(rect, source, parameter.name, part)
                    cells.setdefault((sources.holders[source], number), []).append(cell)
    return tuple(
        Group(
            holders=tuple(sorted(rank for n in numbers for rank in holdings[n].ranks)),
            wanting=tuple(sorted(targets[target].ranks)),
            cells=tuple(own),
        )
        for (numbers, target), own in cells.items()
    )


def _check_filled(parameter: Parameter) -> None:
    experts = parameter.shape[0] if len(parameter.shape) == 3 else 1
    columns = parameter.shape[-1] if len(parameter.shape) > 1 else 1
    filled = sum(part.rect.num_elements for part in parameter.parts)
    if filled != experts * parameter.padding_row * columns:
        raise ValueError(f"the parts of {parameter.name} do not fill it")
