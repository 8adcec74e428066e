"""Transfer schedules of published models: how much each rank sends, and to whom. That every element
arrives: tests/gloo/test_transfer.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from placements import engine_placements, megatron_placements
from plan_cases import REAL_SHAPES
from tiny_models import SHAPES

from megatron_opsft.architectures.shape import ModelShape
from megatron_opsft.weights.reshard import Placement, Route, find_routes
from megatron_opsft.weights.rules import WeightTable
from megatron_opsft.weights.schedule import Schedule, make_schedule
from megatron_opsft.weights.vllm_layout import vllm_parameters

MIB = 2**20
BOTH_WAYS = pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])


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


def lower_bound(routes: Sequence[Route], route_bytes: Sequence[int]) -> int:
    """Bytes that some rank must send, however they are dealt; route_bytes: to each receiver.

    For a set S of ranks let B(S) be the bytes of all routes whose holders are in S, once for each
    receiver: nobody else can send them, so some rank of S sends B(S) / |S| or more. The result is
    the largest such quotient over the holder sets of all routes and over all holders together.
    Where holder sets are nested or disjoint, dealing in fractions of a byte would reach it.
    """
    needs: dict[frozenset[int], int] = {}
    for route, size in zip(routes, route_bytes, strict=True):
        holders = frozenset(route.holders)
        if route.receivers:
            needs[holders] = needs.get(holders, 0) + size * len(route.receivers)
    sets = [*needs, frozenset[int]().union(*needs)] if needs else []
    return max((-(-sum(b for o, b in needs.items() if o <= s) // len(s)) for s in sets), default=0)


def both_sides(
    shape: ModelShape,
    tp: int,
    pp: int,
    dp: int,
    engine_tp: int,
    vpp: int | None = None,
    **experts: int,
) -> tuple[Sequence[Placement], Sequence[Placement]]:
    """Who holds what in the trainer, and in the engines on the same ranks. experts: ep, etp."""
    table = WeightTable(shape, tp_size=tp)
    engine = partial(vllm_parameters, table, tp_size=engine_tp)
    return (
        megatron_placements(table, tp=tp, pp=pp, dp=dp, vpp=vpp, **experts),
        engine_placements(engine, engine_tp, tp * pp * dp),
    )


@pytest.mark.slow
@BOTH_WAYS
@pytest.mark.parametrize(
    ("model", "tp", "pp", "dp", "engine_tp", "experts"),
    [
        ("DeepSeek-R1-Distill-Qwen-1.5B", 2, 4, 8, 2, {}),
        ("DeepSeek-R1-Distill-Qwen-1.5B", 2, 2, 4, 4, {}),  # each k/v head on two engine ranks
        ("DeepSeek-R1-Distill-Qwen-32B", 8, 2, 1, 1, {}),
        ("Qwen3-30B-A3B", 4, 4, 4, 2, {}),
        ("Qwen3-30B-A3B", 4, 1, 8, 2, {"ep": 8, "etp": 4}),
    ],
)
def test_no_rank_sends_much_more_than_some_rank_must(
    model: str, tp: int, pp: int, dp: int, engine_tp: int, experts: dict[str, int], pull: bool
) -> None:
    shape = REAL_SHAPES[model]
    if shape.moe is not None:  # 128 experts a layer: few layers have enough to balance
        shape = replace(shape, num_layers=2 if experts else 4)
    trainer, engine = both_sides(shape, tp, pp, dp, engine_tp, **experts)
    sources, targets = (engine, trainer) if pull else (trainer, engine)
    world_size, bucket = tp * pp * dp, 256 * MIB
    schedules = schedules_of(
        sources, targets, world_size=world_size, itemsize=2, bucket_bytes=bucket
    )
    sent, received, local = traffic(schedules, itemsize=2)
    least = least_bytes(sources, targets)
    assert least <= max(sent) <= 1.10 * least
    busiest = max(a + b for a, b in zip(sent, received, strict=True))
    assert all(len(schedule.rounds) <= 1.25 * busiest / bucket + 1 for schedule in schedules)
    assert sum(sent) == sum(received)
    needed = sum(_held_bytes(h) * len(h.ranks) for h in targets)
    assert sum(received) + local == needed


def least_bytes(sources: Sequence[Placement], targets: Sequence[Placement]) -> int:
    """Of two-byte values that some rank must send."""
    routes = find_routes(sources, targets)
    return lower_bound(routes, [2 * route.num_elements for route in routes])


def _held_bytes(placement: Placement) -> int:
    return 2 * sum(part.source.num_elements for p in placement.parameters for part in p.parts)


def test_a_rank_that_holds_what_it_wants_receives_nothing() -> None:
    trainer, engine = both_sides(REAL_SHAPES["DeepSeek-R1-Distill-Qwen-1.5B"], 2, 1, 4, 2)
    schedule = make_schedule(trainer, engine, rank=5, itemsize=2, bucket_bytes=MIB)
    assert set(schedule.bytes_sent.values()) == {0}
    assert least_bytes(trainer, engine) == len(schedule.rounds) == 0
    copied = sum(copy.target.num_elements for copy in schedule.program(5).copies)
    assert 2 * copied == _held_bytes(engine[1])


def test_every_rank_has_partners_in_its_own_block_alone() -> None:
    """As many blocks as there are replicas, each with a rank of every shard and stage."""
    trainer, engine = both_sides(SHAPES["qwen2"], 2, 2, 500, 2)
    sent = set()
    for rank in (0, 7, 1003, 1999):
        schedule = make_schedule(trainer, engine, rank=rank, itemsize=2, bucket_bytes=30_000)
        rounds = schedule.program(rank).rounds
        partners = {peer for each in rounds for peer in (*each.sends, *each.receives)}
        first = rank % 1000 // 2 * 2
        block = (first, first + 1, first + 1000, first + 1001)
        assert partners == {*block} - {rank}
        sent.add((len(rounds), *(schedule.bytes_sent[peer] for peer in block)))
    assert len(sent) == 1
