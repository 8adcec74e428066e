"""Simulated time against times worked out by hand."""

import pytest

from megatron_opsft.plan.events import Clock, Cores, Process, Signal, Work
from megatron_opsft.plan.schedule import Pass, rank_order, what_it_needs


def test_processes_wait_for_time_and_for_each_other() -> None:
    clock, seen = Clock(), []
    meeting = Signal(2)

    def one(name: str, seconds: float) -> Process:
        yield seconds
        yield clock.arrive(meeting)
        seen.append((name, clock.now))
        yield Work(1.0)
        seen.append((name, clock.now))

    clock.start(one("slow", 3.0))
    clock.start(one("fast", 1.0))
    clock.run()
    assert seen == [("slow", 3.0), ("fast", 3.0), ("slow", 4.0), ("fast", 4.0)]


def test_waiting_for_ever_is_an_error() -> None:
    clock = Clock()

    def process() -> Process:
        yield Signal()

    clock.start(process())
    with pytest.raises(RuntimeError, match="1 processes wait for ever"):
        clock.run()


@pytest.mark.parametrize(
    ("work", "cores", "ends"),
    [
        ([(0.0, 4.0, 1), (0.0, 4.0, 1)], 2, [4.0, 4.0]),  # enough for all
        ([(0.0, 4.0, 1)] * 4, 2, [8.0] * 4),  # half a core each
        # Three on two cores until the short one is through at 3; the others have done 2 of 4.
        ([(0.0, 2.0, 1), (0.0, 4.0, 1), (0.0, 4.0, 1)], 2, [3.0, 5.0, 5.0]),
        # Alone for one second; then both want two cores of two: half as fast.
        ([(0.0, 2.0, 2), (1.0, 1.0, 2)], 2, [3.0, 3.0]),
        ([(0.0, 0.0, 1), (0.0, 1.0, 1)], 1, [0.0, 1.0]),
    ],
)
def test_cores_are_shared_evenly(
    work: list[tuple[float, float, int]], cores: int, ends: list[float]
) -> None:
    clock, found = Clock(), {}
    shared = Cores(clock, cores)

    def process(number: int, start: float, seconds: float, width: int) -> Process:
        yield start
        yield Work(seconds, shared, width)
        found[number] = clock.now

    for number, one in enumerate(work):
        clock.start(process(number, *one))
    clock.run()
    assert [found[number] for number in range(len(work))] == pytest.approx(ends)


def shown(stage: int, pp: int, num_microbatches: int, vpp: int = 1) -> str:
    """F0 B0 ..., with virtual stages F0a F1a F0b ..."""
    names = [
        f"{'F' if one.forward else 'B'}{one.microbatch}{'abc'[one.chunk] if vpp > 1 else ''}"
        for one in rank_order(stage, pp, num_microbatches, vpp)
    ]
    return " ".join(names)


def test_one_forward_one_backward() -> None:
    assert shown(0, 1, 2) == "F0 B0 F1 B1"
    assert shown(0, 3, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert shown(2, 3, 2) == "F0 B0 F1 B1"
    assert shown(0, 4, 2) == "F0 F1 B0 B1"


def test_interleaved() -> None:
    # Two stages of two chunks, as in Megatron's get_schedule_table for two micro-batches a group.
    assert shown(1, 2, 2, vpp=2) == "F0a F1a F0b B0b F1b B1b B0a B1a"
    assert shown(0, 2, 2, vpp=2) == "F0a F1a F0b F1b B0b B1b B0a B1a"


@pytest.mark.parametrize(("pp", "count", "vpp"), [(1, 3, 1), (4, 8, 1), (4, 2, 1), (2, 6, 3)])
def test_every_pass_comes_once_and_after_what_it_needs(pp: int, count: int, vpp: int) -> None:
    orders = [list(rank_order(stage, pp, count, vpp)) for stage in range(pp)]
    for order in orders:
        assert len(order) == len(set(order)) == 2 * count * vpp
    # All ranks in step: something is always possible until everything is through.
    done: set[tuple[Pass, int]] = set()
    places = [0] * pp
    while sum(places) < 2 * count * vpp * pp:
        before = sum(places)
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                needed = what_it_needs(order[places[stage]], stage, pp, vpp)
                if needed is not None and needed not in done:
                    break
                done.add((order[places[stage]], stage))
                places[stage] += 1
        assert sum(places) > before, "deadlock"
