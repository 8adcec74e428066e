"""What a schedule must be, checked from the programs of all ranks and from who holds what alone."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_opsft.weights.rectangles import Parameter, Rect
from megatron_opsft.weights.reshard import Placement
from megatron_opsft.weights.schedule import Program, Schedule, make_schedule


def schedules_of(
    sources: Sequence[Placement],
    targets: Sequence[Placement],
    *,
    world_size: int,
    itemsize: int,
    bucket_bytes: int,
) -> list[Schedule]:
    """By rank: the schedule of its block, which is made once for all its ranks."""
    found: dict[int, Schedule] = {}
    for rank in range(world_size):
        if rank not in found:
            schedule = make_schedule(
                sources, targets, rank=rank, itemsize=itemsize, bucket_bytes=bucket_bytes
            )
            found |= dict.fromkeys((rank, *schedule.bytes_sent), schedule)
    return [found[rank] for rank in range(world_size)]


def traffic(schedules: Sequence[Schedule], itemsize: int) -> tuple[list[int], list[int], int]:
    """Bytes sent and received by each rank, and those that all ranks copy from themselves."""
    sent, received = [0] * len(schedules), [0] * len(schedules)
    local = 0
    for schedule in {id(schedule): schedule for schedule in schedules}.values():
        for send in (send for sends in schedule.rounds for send in sends):
            num_bytes = send.copy.source.num_elements * itemsize
            sent[send.sender] += num_bytes
            received[send.receiver] += num_bytes
        local += sum(r.num_elements * len(r.local) * itemsize for r in schedule.routes)
    return sent, received, local


def by_rank(placements: Sequence[Placement]) -> dict[int, dict[str, Parameter]]:
    """rank -> name -> parameter."""
    named = [({p.name: p for p in h.parameters}, h.ranks) for h in placements]
    return {rank: parameters for parameters, ranks in named for rank in ranks}


def content(parameter: Parameter, rect: Rect) -> Rect:
    """The rectangle of an HF tensor in one of a parameter, which never spans two parts."""
    for part in parameter.parts:
        cut = part.inverse.cut(rect)
        if cut is not None:
            assert cut.source == rect, f"{rect} is not inside a part of {parameter.name}"
            return cut.target
    raise AssertionError(f"{rect} is not inside a part of {parameter.name}")


def check_schedule(
    schedules: Sequence[Schedule],
    sources: Sequence[Placement],
    targets: Sequence[Placement],
    *,
    world_size: int,
    itemsize: int,
    bucket_bytes: int,
) -> None:
    """Every target element is written once, with the right content; messages match; rounds fit.

    schedules: by rank.
    """
    programs = [schedule.program(rank) for rank, schedule in enumerate(schedules)]
    have, want = by_rank(sources), by_rank(targets)
    (num_rounds,) = {len(program.rounds) for program in programs}
    sent, received, local = ([0] * world_size for _ in range(3))
    written: dict[tuple[int, str], list[Rect]] = {
        (rank, name): [] for rank, parameters in want.items() for name in parameters
    }
    for rank, program in enumerate(programs):
        for copy in program.copies:
            source, target = copy.source, copy.target
            held = content(have[rank][source.tensor], source)
            assert held == content(want[rank][target.tensor], target)
            written[rank, target.tensor].append(target)
            local[rank] += target.num_elements * itemsize
        for padding in program.zeros:
            written[rank, padding.tensor].append(padding)
    for number in range(num_rounds):
        loads = [0] * world_size
        for sender, peer, out, into in _messages(programs, number):
            assert sender != peer
            assert [content(have[sender][s.tensor], s) for s in out] == [
                content(want[peer][s.tensor], s) for s in into
            ]
            for piece in into:
                written[peer, piece.tensor].append(piece)
            size = sum(s.num_elements for s in out) * itemsize
            sent[sender] += size
            received[peer] += size
            loads[sender] += size
            loads[peer] += size
        assert 0 < max(loads) <= bucket_bytes
    for (rank, name), rects in written.items():
        _check_tiles(want[rank][name], rects)
    assert (sent, received, sum(local)) == traffic(schedules, itemsize)
    assert sent == [schedule.bytes_sent.get(rank, 0) for rank, schedule in enumerate(schedules)]


def _messages(
    programs: Sequence[Program], number: int
) -> Iterable[tuple[int, int, tuple[Rect, ...], tuple[Rect, ...]]]:
    """(sender, receiver, its rectangles, the receiver's) of one round; both name the same ones."""
    out = {
        (rank, peer): rects
        for rank, program in enumerate(programs)
        for peer, rects in program.rounds[number].sends.items()
    }
    into = {
        (peer, rank): rects
        for rank, program in enumerate(programs)
        for peer, rects in program.rounds[number].receives.items()
    }
    assert out.keys() == into.keys()
    return [(*ends, rects, into[ends]) for ends, rects in out.items()]


def _check_tiles(parameter: Parameter, rects: list[Rect]) -> None:
    """The rectangles cover the parameter, and no two of them overlap."""
    experts = parameter.shape[0] if len(parameter.shape) == 3 else 1
    rows, columns = (*parameter.shape, 1)[experts > 1 :][:2]
    assert sum(s.num_elements for s in rects) == experts * rows * columns, parameter.name
    above: list[Rect] = []
    for piece in sorted(rects, key=lambda s: (s.index or 0, s.row0, s.col0)):
        above = [s for s in above if s.index == piece.index and s.row1 > piece.row0]
        for other in above:
            assert piece.col0 >= other.col1 or other.col0 >= piece.col1, parameter.name
        assert 0 <= piece.row0 < piece.row1 <= rows and 0 <= piece.col0 < piece.col1 <= columns
        assert piece.index is None or piece.index < experts
        above.append(piece)


def shorter(placements: Sequence[Placement], position: int) -> list[Placement]:
    """The first placement without one of its parameters."""
    kept = [p for n, p in enumerate(placements[0].parameters) if n != position]
    return [replace(placements[0], parameters=tuple(kept)), *placements[1:]]
