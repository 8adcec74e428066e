"""What a plan must be, checked from the programs of all ranks and from who holds what alone."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_opsft.weights.layouts import Holding, Parameter, Rect, Slice
from megatron_opsft.weights.plan import Plan, Program


def by_rank(holdings: Sequence[Holding]) -> dict[int, dict[str, Parameter]]:
    """rank -> name -> parameter."""
    named = [({p.name: p for p in h.parameters}, h.ranks) for h in holdings]
    return {rank: parameters for parameters, ranks in named for rank in ranks}


def content(parameter: Parameter, piece: Slice) -> tuple[str, Rect]:
    """HF tensor and rectangle in a slice of a parameter; a slice never spans two parts."""
    for part in parameter.parts:
        down, right = piece.row0 - part.row, piece.col0 - part.col
        rect = Rect(
            part.rect.row0 + down,
            part.rect.row0 + down + piece.row1 - piece.row0,
            part.rect.col0 + right,
            part.rect.col0 + right + piece.col1 - piece.col0,
        )
        if part.index == piece.index and rect.intersect(part.rect) == rect:
            return part.hf_name, rect
    raise AssertionError(f"{piece} is not inside a part of {parameter.name}")


def check_plan(
    plan: Plan,
    sources: Sequence[Holding],
    targets: Sequence[Holding],
    *,
    world_size: int,
    itemsize: int,
    bucket_bytes: int,
) -> None:
    """Every target element is written once, with the right content; messages match; rounds fit."""
    programs = [plan.program(rank) for rank in range(world_size)]
    have, want = by_rank(sources), by_rank(targets)
    assert {len(program.rounds) for program in programs} == {plan.num_rounds}
    sent, received, local = ([0] * world_size for _ in range(3))
    written: dict[tuple[int, str], list[Slice]] = {
        (rank, name): [] for rank, parameters in want.items() for name in parameters
    }
    for rank, program in enumerate(programs):
        for source, target in program.copies:
            assert content(have[rank][source.parameter], source) == content(
                want[rank][target.parameter], target
            )
            written[rank, target.parameter].append(target)
            local[rank] += target.num_elements * itemsize
        for padding in program.zeros:
            written[rank, padding.parameter].append(padding)
    for number in range(plan.num_rounds):
        loads = [0] * world_size
        for sender, peer, out, into in _messages(programs, number):
            assert sender != peer
            assert [content(have[sender][s.parameter], s) for s in out] == [
                content(want[peer][s.parameter], s) for s in into
            ]
            for piece in into:
                written[peer, piece.parameter].append(piece)
            size = sum(s.num_elements for s in out) * itemsize
            sent[sender] += size
            received[peer] += size
            loads[sender] += size
            loads[peer] += size
        assert 0 < max(loads) <= bucket_bytes
    for (rank, name), slices in written.items():
        _check_tiles(want[rank][name], slices)
    assert (tuple(sent), tuple(received), tuple(local)) == (
        plan.bytes_sent,
        plan.bytes_received,
        plan.bytes_local,
    )


def _messages(
    programs: Sequence[Program], number: int
) -> Iterable[tuple[int, int, tuple[Slice, ...], tuple[Slice, ...]]]:
    """(sender, receiver, its slices, the receiver's) of one round; both name the same messages."""
    out = {
        (rank, peer): slices
        for rank, program in enumerate(programs)
        for peer, slices in program.rounds[number].sends.items()
    }
    into = {
        (peer, rank): slices
        for rank, program in enumerate(programs)
        for peer, slices in program.rounds[number].receives.items()
    }
    assert out.keys() == into.keys()
    return [(*ends, slices, into[ends]) for ends, slices in out.items()]


def _check_tiles(parameter: Parameter, slices: list[Slice]) -> None:
    """The slices cover the parameter, and no two of them overlap."""
    experts = parameter.shape[0] if len(parameter.shape) == 3 else 1
    rows, columns = (*parameter.shape, 1)[experts > 1 :][:2]
    assert sum(s.num_elements for s in slices) == experts * rows * columns, parameter.name
    above: list[Slice] = []
    for piece in sorted(slices, key=lambda s: (s.index or 0, s.row0, s.col0)):
        above = [s for s in above if s.index == piece.index and s.row1 > piece.row0]
        for other in above:
            assert piece.col0 >= other.col1 or other.col0 >= piece.col1, parameter.name
        assert 0 <= piece.row0 < piece.row1 <= rows and 0 <= piece.col0 < piece.col1 <= columns
        assert piece.index is None or piece.index < experts
        above.append(piece)


def shorter(holdings: Sequence[Holding], position: int) -> list[Holding]:
    """The first holding without one of its parameters."""
    kept = [p for n, p in enumerate(holdings[0].parameters) if n != position]
    return [replace(holdings[0], parameters=tuple(kept)), *holdings[1:]]
