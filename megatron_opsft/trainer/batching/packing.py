"""Assignment of sequences to micro-batches: packed (THD) up to a token budget, with the same number
of micro-batches on every rank.

Pure and deterministic: every rank makes the whole plan and builds its own micro-batches of it
(`microbatch.pack`). First-fit tells how few bins suffice. Then the sequences, longest first, go to
the cheapest rank that has room, and there into the cheapest bin that has room.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import chain
from typing import Generic, NamedTuple, Protocol, TypeVar

from megatron_opsft.runtime.rounding import ceil_div

Bin = list[int]
"""Indices of the sequences that one micro-batch packs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingReport:
    """Quality of a plan, or of several plans that run one after another; all 0 if no sequences."""

    num_tokens: int = 0
    """Tokens in all bins, without padding."""
    room: int = 0
    """Tokens that fit into all bins; a single sequence beyond the budget counts its length."""
    mean_cost: float = 0.0
    """Mean of the ranks' costs, in units of `sequence_cost`."""
    cost_spread: float = 0.0
    """Cost of the most expensive rank minus that of the cheapest."""
    num_bins: int = 0
    """Bins of all ranks, empty ones included."""

    @property
    def fill(self) -> float:
        """Share of the room that tokens take."""
        return self.num_tokens / self.room if self.room else 0.0

    @property
    def imbalance(self) -> float:
        """(most - least) / mean of the ranks' costs."""
        return self.cost_spread / self.mean_cost if self.mean_cost else 0.0


def whole_packing(reports: Sequence[PackingReport]) -> PackingReport:
    """Return the report on several updates together; ranks wait for each other after each."""
    return PackingReport(
        num_tokens=sum(report.num_tokens for report in reports),
        room=sum(report.room for report in reports),
        mean_cost=sum(report.mean_cost for report in reports),
        cost_spread=sum(report.cost_spread for report in reports),
        num_bins=sum(report.num_bins for report in reports),
    )


def sequence_cost(num_tokens: int, quadratic_at: float) -> float:
    """Return the relative compute of one sequence: a linear part plus attention's square.

    quadratic_at: the length in tokens at which attention costs as much as everything else.
    """
    return num_tokens * (1.0 + num_tokens / quadratic_at)


def plan_packing(
    lengths: Sequence[int],
    *,
    budget: int,
    dp_size: int,
    multiple: int = 1,
    quadratic_at: float = 8192.0,
) -> list[list[Bin]]:
    """Return the bins of each data-parallel rank, as indices into `lengths`; every rank has equally
    many.

    A bin has at most `budget` tokens, or one longer sequence. The number of bins per rank is a
    multiple of `multiple` (interleaved 1F1B needs a multiple of the pipeline size): the least that
    first-fit allows, or the next one in which all sequences find room. A bin may be empty; it
    becomes a micro-batch of padding.

    Ranks are balanced by `sequence_cost`. Each has its most expensive bin first, because
    expert-parallel ranks wait for each other in every micro-batch and should work on equal ones.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    costs = [sequence_cost(length, quadratic_at) for length in lengths]
    num_bins = ceil_div(_first_fit(lengths, order, budget), dp_size * multiple)
    num_bins *= multiple
    plan = _assign_to_ranks(lengths, costs, order, budget, dp_size, num_bins)
    while plan is None:
        num_bins += multiple
        plan = _assign_to_ranks(lengths, costs, order, budget, dp_size, num_bins)
    for bins in plan:
        bins.sort(key=lambda indices: -sum(costs[index] for index in indices))
    return plan


class _Container(Protocol):
    """A bin, or a rank with its bins, in a `_RoomQueue`."""

    number: int
    cost: float

    @property
    def room(self) -> int:
        """Longest sequence that it still takes; read only after `has_room` returned False."""

    def has_room(self, length: int) -> bool:
        """True if it takes a sequence of `length` tokens."""


_C = TypeVar("_C", bound=_Container)


class _Entry(NamedTuple, Generic[_C]):
    priority: float
    number: int
    """Number of the container: decides between equal priorities."""
    container: _C


class _RoomQueue(Generic[_C]):
    """Containers that are asked again and again for the cheapest one with room.

    Sequences come longest first. So a container that has room keeps it until something is put into
    it, and each sequence moves few containers between the two heaps.
    """

    def __init__(self) -> None:
        self._roomy: list[_Entry[_C]] = []
        """A heap by cost; only the room of the top one is checked."""
        self._full: list[_Entry[_C]] = []
        """A heap by -room: containers that were too small for the last sequence."""

    def add(self, container: _C) -> None:
        """Add a container."""
        heappush(self._roomy, _Entry(container.cost, container.number, container))

    def cheapest(self, length: int) -> _C | None:
        """Return the cheapest container that takes `length` tokens, the first of equal ones."""
        while self._full and self._full[0].container.room >= length:
            self.add(heappop(self._full).container)
        while self._roomy and not self._roomy[0].container.has_room(length):
            container = heappop(self._roomy).container
            entry = _Entry(-container.room, container.number, container)
            heappush(self._full, entry)
        return self._roomy[0].container if self._roomy else None

    def update_cheapest(self) -> None:
        """Reorder after the container that `cheapest` returned got a sequence."""
        container = self._roomy[0].container
        entry = _Entry(container.cost, container.number, container)
        heapreplace(self._roomy, entry)

    def largest_room(self) -> int:
        """Return the largest room of a container, after `cheapest` returned None."""
        return self._full[0].container.room


@dataclass(slots=True)
class _OpenBin:
    """A bin while it is filled."""

    number: int
    room: int
    cost: float = 0.0
    indices: Bin = field(default_factory=list)

    def has_room(self, length: int) -> bool:
        return self.room >= length


class _Rank:
    """A data-parallel rank and its bins, while they are filled."""

    def __init__(self, number: int, num_bins: int, longest: int) -> None:
        self.number = number
        self.cost = 0.0
        # An empty bin takes any sequence, even one beyond the budget.
        self.bins = [_OpenBin(bin_number, longest) for bin_number in range(num_bins)]
        self._queue = _RoomQueue[_OpenBin]()
        for empty_bin in self.bins:
            self._queue.add(empty_bin)

    @property
    def room(self) -> int:
        return self._queue.largest_room()

    def has_room(self, length: int) -> bool:
        return self._queue.cheapest(length) is not None

    def pack(self, index: int, length: int, cost: float, budget: int) -> None:
        """Put a sequence that the rank has room for into the cheapest bin with room."""
        cheapest = self._queue.cheapest(length)
        assert cheapest is not None
        room_before = cheapest.room if cheapest.indices else budget
        cheapest.room = room_before - length
        cheapest.cost += cost
        cheapest.indices.append(index)
        self._queue.update_cheapest()
        self.cost += cost


def _first_fit(lengths: Sequence[int], order: Sequence[int], budget: int) -> int:
    """Return the number of bins needed if each sequence, in `order`, goes into the first bin with
    room, or into a new one.
    """
    queue = _RoomQueue[_OpenBin]()  # all of cost 0: the cheapest is the first
    num_bins = 0
    for index in order:
        length = lengths[index]
        first = queue.cheapest(length)
        if first is not None:
            first.room -= length
        else:
            queue.add(_OpenBin(num_bins, budget - length))
            num_bins += 1
    return num_bins


def _assign_to_ranks(
    lengths: Sequence[int],
    costs: Sequence[float],
    order: Sequence[int],
    budget: int,
    dp_size: int,
    num_bins: int,
) -> list[list[Bin]] | None:
    """Return the bins of each rank, `num_bins` for each; None if a sequence finds no room."""
    longest = max(lengths, default=0)
    ranks = [_Rank(number, num_bins, longest) for number in range(dp_size)]
    queue = _RoomQueue[_Rank]()
    for rank in ranks:
        queue.add(rank)
    for index in order:
        cheapest = queue.cheapest(lengths[index])
        if cheapest is None:
            return None
        cheapest.pack(index, lengths[index], costs[index], budget)
        queue.update_cheapest()
    plan = []
    for rank in ranks:
        plan.append([packed_bin.indices for packed_bin in rank.bins])
    return plan


def describe_plan(
    lengths: Sequence[int],
    plan: Sequence[Sequence[Bin]],
    *,
    budget: int,
    quadratic_at: float,
) -> PackingReport:
    """Report how full the bins of a plan are and how well its ranks are balanced."""
    bin_tokens = []
    rank_costs = []
    for bins in plan:
        for indices in bins:
            bin_tokens.append(sum(lengths[index] for index in indices))
        rank_costs.append(
            sum(
                sequence_cost(lengths[index], quadratic_at)
                for index in chain.from_iterable(bins)
            )
        )
    num_tokens = sum(bin_tokens)
    room = sum(max(budget, tokens) for tokens in bin_tokens)
    return PackingReport(
        num_tokens=num_tokens,
        room=room if num_tokens else 0,
        mean_cost=sum(rank_costs) / len(rank_costs),
        cost_spread=max(rank_costs) - min(rank_costs),
        num_bins=len(bin_tokens),
    )
