"""Assignment of sequences to micro-batches: packed (THD) up to a token budget, with the same number
of micro-batches on every rank.

Pure and deterministic: every rank makes the whole plan (`microbatch.plan_packs`) and builds its own
micro-batches of it (`microbatch.pack`). First-fit tells how few bins suffice. Then the sequences,
longest first, go to the cheapest rank that has room, and there into the cheapest bin that has room.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from megatron_opsft.runtime.rounding import ceil_div

Bin = list[int]  # indices of the sequences that one micro-batch packs


class PackingReport(NamedTuple):
    """Quality of a plan, or of several plans that run one after another; all 0 if no sequences."""

    num_tokens: int = 0
    """Tokens in all bins, without padding."""
    room: int = 0
    """Tokens that fit into all bins; a single sequence beyond the budget counts its length."""
    mean_cost: float = 0.0
    """Mean of the ranks' costs, in units of `sequence_cost`."""
    cost_spread: float = 0.0
    """Cost of the most expensive rank minus that of the cheapest."""

    @property
    def fill(self) -> float:
        """Share of the room that tokens take."""
        return self.num_tokens / self.room if self.room else 0.0

    @property
    def imbalance(self) -> float:
        """(most - least) / mean of the ranks' costs."""
        return self.cost_spread / self.mean_cost if self.mean_cost else 0.0


def whole_packing(reports: Sequence[PackingReport]) -> PackingReport:
    """Return the report on several updates, whose fields are the sums of theirs: since ranks wait
    for each other after every update, costs and their spreads add up.
    """
    return PackingReport._make(map(sum, zip(*reports, strict=True)))


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
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    costs = [sequence_cost(length, quadratic_at) for length in lengths]
    num_bins = ceil_div(_first_fit(lengths, order, budget), dp_size * multiple)
    num_bins *= multiple
    plan = None
    while plan is None:
        plan = _assign_to_ranks(lengths, costs, order, budget, dp_size, num_bins)
        num_bins += multiple
    for bins in plan:
        bins.sort(key=lambda indices: -sum(costs[index] for index in indices))
    return plan


@dataclass(slots=True)
class _OpenBin:
    """A bin while it is filled."""

    number: int
    room: int
    cost: float = 0.0
    indices: Bin = field(default_factory=list)

    def has_room(self, length: int) -> bool:
        """True if a sequence of `length` tokens fits."""
        return self.room >= length

    def put(self, index: int, length: int, cost: float, budget: int) -> None:
        """Put in a sequence.

        The first one may be longer than `budget`; with it the bin has room for `budget` tokens in
        all.
        """
        self.room = min(self.room, budget) - length
        self.cost += cost
        self.indices.append(index)


class _Entry(NamedTuple):
    """A member of a group in one of its heaps."""

    priority: float
    number: int
    member: "_OpenBin | _Group"


class _Group:
    """The bins of a rank, or the ranks with their bins: each sequence goes to the cheapest member
    that has room.

    Sequences come longest first. So a member that has room keeps it until something is put into it,
    and each sequence moves few members between the two heaps.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.cost = 0.0
        # A heap, cheapest first. `has_room` moves full members out of it until the first one has
        # room; it does not look at those behind.
        self._roomy: list[_Entry] = []
        # A heap, most room first: members into which the sequence that `has_room` last tried does
        # not fit.
        self._full: list[_Entry] = []

    def add(self, member: "_OpenBin | _Group") -> None:
        """Add a bin or a rank."""
        heappush(self._roomy, _Entry(member.cost, member.number, member))

    @property
    def room(self) -> int:
        """The largest room of a member; valid after `has_room` returned False."""
        return self._full[0].member.room

    def has_room(self, length: int) -> bool:
        """True if a sequence of `length` tokens fits into a member; `put` uses the cheapest one."""
        while self._full and self.room >= length:
            self.add(heappop(self._full).member)
        while self._roomy and not self._roomy[0].member.has_room(length):
            member = heappop(self._roomy).member
            heappush(self._full, _Entry(-member.room, member.number, member))
        return bool(self._roomy)

    def put(self, index: int, length: int, cost: float, budget: int) -> None:
        """Put a sequence, which must fit by `has_room`, into the cheapest member with room."""
        cheapest = heappop(self._roomy).member
        cheapest.put(index, length, cost, budget)
        self.add(cheapest)
        self.cost += cost


def _first_fit(lengths: Sequence[int], order: Sequence[int], budget: int) -> int:
    """Return the number of bins needed if each sequence, in `order`, goes into the first bin with
    room, or into a new one.
    """
    bins = _Group(0)
    num_bins = 0
    for index in order:
        if not bins.has_room(lengths[index]):
            bins.add(_OpenBin(num_bins, budget))
            num_bins += 1
        # Without costs the cheapest bin with room is the first one.
        bins.put(index, lengths[index], 0.0, budget)
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
    # An empty bin takes any sequence, even one beyond the budget.
    room = max([budget, *lengths])
    plan = []
    ranks = _Group(0)
    for rank_number in range(dp_size):
        rank = _Group(rank_number)
        bins: list[Bin] = []
        for number in range(num_bins):
            empty_bin = _OpenBin(number, room)
            rank.add(empty_bin)
            bins.append(empty_bin.indices)
        ranks.add(rank)
        plan.append(bins)
    for index in order:
        if not ranks.has_room(lengths[index]):
            return None
        ranks.put(index, lengths[index], costs[index], budget)
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
        costs: list[float] = []
        for indices in bins:
            in_bin = [lengths[index] for index in indices]
            bin_tokens.append(sum(in_bin))
            costs += [sequence_cost(length, quadratic_at) for length in in_bin]
        rank_costs.append(sum(costs))
    num_tokens = sum(bin_tokens)
    room = sum(max(budget, tokens) for tokens in bin_tokens)
    return PackingReport(
        num_tokens=num_tokens,
        room=room if num_tokens else 0,
        mean_cost=sum(rank_costs) / len(rank_costs),
        cost_spread=max(rank_costs) - min(rank_costs),
    )
