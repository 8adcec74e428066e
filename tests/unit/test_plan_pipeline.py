"""Pipelines and shared cores against times worked out by hand and closed forms."""

import numpy as np
import pytest

from megatron_opsft.plan.cores import shared_ends
from megatron_opsft.plan.pipeline import Pass, input_of, pipeline_ends, rank_order


@pytest.mark.parametrize(
    ("seconds", "widths", "cores", "ends"),
    [
        ([4.0, 4.0], [1, 1], 2, [4.0, 4.0]),  # enough for all
        ([4.0] * 4, [1] * 4, 2, [8.0] * 4),  # half a core each
        # Three on two cores until the short one is through at 3; the others have done 2 of 4.
        ([2.0, 4.0, 4.0], [1, 1, 1], 2, [3.0, 5.0, 5.0]),
        # Both want two cores of two, until the first is through at 2.
        ([2.0, 1.0], [2, 2], 2, [3.0, 2.0]),
        ([0.0, 1.0], [1, 1], 1, [0.0, 1.0]),
        ([3.0, 1.0, 2.0], [8, 8, 8], float("inf"), [3.0, 1.0, 2.0]),
    ],
)
def test_cores_are_shared_evenly(
    seconds: list[float], widths: list[int], cores: float, ends: list[float]
) -> None:
    assert shared_ends(seconds, widths, cores) == pytest.approx(ends)


def shown(stage: int, pp: int, num_microbatches: int, vpp: int = 1) -> str:
    """F0 B0 ..., with virtual stages F0a F1a F0b ..."""
    names = [
        f"{'F' if one.is_forward else 'B'}{one.microbatch}{'abc'[one.chunk] if vpp > 1 else ''}"
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
                needed = input_of(order[places[stage]], stage, pp, vpp)
                if needed is not None and needed not in done:
                    break
                done.add((order[places[stage]], stage))
                places[stage] += 1
        assert sum(places) > before, "deadlock"


@pytest.mark.parametrize(
    ("pp", "vpp", "count"), [(1, 1, 5), (4, 1, 5), (4, 3, 8), (2, 1, 1), (7, 2, 14)]
)
def test_equal_passes_fill_and_drain_the_pipeline(pp: int, vpp: int, count: int) -> None:
    """(m + (p - 1) / v) x one micro-batch (Narayanan et al., 2021)."""
    one = np.full((pp, vpp, 1, count), 1.0 / vpp)
    ends = pipeline_ends(one, 2 * one)
    assert ends.max() == pytest.approx(3.0 * (count + (pp - 1) / vpp))


def test_the_slowest_stage_sets_the_pace() -> None:
    seconds = np.array([1 / 3, 1.0])[:, None, None, None] * np.ones((2, 1, 1, 5))
    # The second stage works on five micro-batches; the first one's first and last pass surround it.
    assert pipeline_ends(seconds, 2 * seconds)[:, 0] == pytest.approx([16.0, 15.0 + 1 / 3])


def test_replicas_do_not_wait_for_each_other() -> None:
    """One stage: its own passes; two: micro-batches of several lengths, by hand."""
    forward = np.array([[1.0, 2.0], [3.0, 0.5]])
    alone = pipeline_ends(forward[None, None], 2 * forward[None, None])
    assert alone[0] == pytest.approx([9.0, 10.5])
    both = np.stack([forward[None]] * 2)
    ends = pipeline_ends(both, 2 * both)
    # Stage 1 of replica 0: F0 1-2, B0 2-4, F1 4-6, B1 6-10; then stage 0: B1 10-14.
    assert ends[:, 0] == pytest.approx([14.0, 10.0])
    # Replica 1: F0 3-6, B0 6-12, F1 12-12.5, B1 12.5-13.5; stage 0: B0 12-18, B1 18-19.
    assert ends[:, 1] == pytest.approx([19.0, 13.5])
