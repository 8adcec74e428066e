"""Transfer schedules of published models: how much each rank sends, and to whom. That every element
arrives: tests/gloo/test_transfer.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import pytest
from placements import engine_placements, megatron_placements
from plan_cases import REAL_SHAPES
from tiny_models import SHAPES

from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.weights.rectangles import Copy
from megatron_opsft.models.weights.reshard import (
    Placement,
    find_copies,
    restrict,
    split_into_blocks,
)
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.models.weights.schedule import make_schedule, plan_rounds
from megatron_opsft.models.weights.vllm_layout import vllm_parameters

BUCKET = 2**28
BOTH_WAYS = pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])


def traffic(
    sources: Sequence[Placement], targets: Sequence[Placement], world_size: int
) -> tuple[list[int], list[int], int, int]:
    """Elements sent and received by each rank, elements that ranks copy from themselves, and the
    most rounds of a block.
    """
    sent, received = [0] * world_size, [0] * world_size
    local = most_rounds = 0
    for block in split_into_blocks(sources, targets):
        copies = find_copies(restrict(sources, block), restrict(targets, block))
        rounds, _ = plan_rounds(copies, itemsize=2, bucket_bytes=BUCKET)
        for send in (send for sends in rounds for send in sends):
            sent[send.sender] += num_copied(send.copies)
            received[send.receiver] += num_copied(send.copies)
        for (holders, wanting), group in copies.items():
            local += num_copied(group) * len({*holders} & {*wanting})
        most_rounds = max(most_rounds, len(rounds))
    return sent, received, local, most_rounds


def least(sources: Sequence[Placement], targets: Sequence[Placement]) -> int:
    """Elements that some rank must send, however they are dealt.

    For a set S of ranks let E(S) be the elements of all copies whose holders are in S, once for
    each receiver: nobody else can send them, so some rank of S sends E(S) / |S| or more. The result
    is the largest such quotient over the holder sets of all copies and over all holders together.
    Where holder sets are nested or disjoint, dealing in fractions would reach it.
    """
    needs: dict[frozenset[int], int] = {}
    for (holders, wanting), copies in find_copies(sources, targets).items():
        if receivers := {*wanting} - {*holders}:
            elements = num_copied(copies) * len(receivers)
            needs[frozenset(holders)] = needs.get(frozenset(holders), 0) + elements
    sets = [*needs, frozenset[int]().union(*needs)] if needs else []
    return max((-(-sum(n for o, n in needs.items() if o <= s) // len(s)) for s in sets), default=0)


def num_copied(copies: Iterable[Copy]) -> int:
    return sum(copy.source.num_elements for copy in copies)


def num_held(placement: Placement) -> int:
    return num_copied(copy for p in placement.parameters for copy in p.copies)


def both_sides(
    shape: ModelShape, tp: int, pp: int, dp: int, engine_tp: int, **experts: int
) -> tuple[Sequence[Placement], Sequence[Placement]]:
    """Who holds what in the trainer, and in the engines on the same ranks. experts: ep, etp."""
    table = WeightTable(shape, tp_size=tp)
    engine = partial(vllm_parameters, table, tp_size=engine_tp)
    return (
        megatron_placements(table, tp=tp, pp=pp, dp=dp, **experts),
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
    world_size = tp * pp * dp
    sent, received, local, rounds = traffic(sources, targets, world_size)
    assert least(sources, targets) <= max(sent) <= 1.10 * least(sources, targets)
    busiest = max(a + b for a, b in zip(sent, received, strict=True))
    assert rounds <= 1.25 * 2 * busiest / BUCKET + 1
    assert sum(sent) == sum(received)
    assert sum(received) + local == sum(num_held(h) * len(h.ranks) for h in targets)


def test_a_rank_that_holds_what_it_wants_receives_nothing() -> None:
    trainer, engine = both_sides(REAL_SHAPES["DeepSeek-R1-Distill-Qwen-1.5B"], 2, 1, 4, 2)
    schedule = make_schedule(trainer, engine, rank=5, itemsize=2, bucket_bytes=BUCKET)
    assert set(schedule.bytes_sent.values()) == {0}
    assert least(trainer, engine) == len(schedule.sends) == 0
    assert num_copied(schedule.copies) == num_held(engine[1])


def test_every_rank_has_partners_in_its_own_block_alone() -> None:
    """As many blocks as there are replicas, each with a rank of every shard and stage."""
    trainer, engine = both_sides(SHAPES["qwen2"], 2, 2, 500, 2)
    sent = set()
    for rank in (0, 7, 1003, 1999):
        schedule = make_schedule(trainer, engine, rank=rank, itemsize=2, bucket_bytes=30_000)
        partners = {peer for by_peer in (*schedule.sends, *schedule.receives) for peer in by_peer}
        first = rank % 1000 // 2 * 2
        block = (first, first + 1, first + 1000, first + 1001)
        assert partners == {*block} - {rank} and {*schedule.bytes_sent} == {*block}
        sent.add((len(schedule.sends), *(schedule.bytes_sent[peer] for peer in block)))
    assert len(sent) == 1
