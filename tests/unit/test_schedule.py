"""Transfer schedules: on shapes of published models, and carried out on small ones."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from placements import engine_placements, lower_bound, megatron_placements
from real_shapes import REAL_SHAPES
from schedule_checks import check_schedule, schedules_of, shorter, traffic
from tiny_models import SHAPES

from megatron_opsft.architectures.shape import ModelShape
from megatron_opsft.weights.rectangles import Copy, Parameter, Rect, hf_parameters
from megatron_opsft.weights.reshard import Placement, Route, find_routes
from megatron_opsft.weights.rules import WeightTable
from megatron_opsft.weights.schedule import make_schedule, split_rows
from megatron_opsft.weights.vllm_layout import tied_head, vllm_parameters

MIB = 2**20
# model, then tp, pp, dp of the trainer, then tp of the engines.
REAL = [
    ("DeepSeek-R1-Distill-Qwen-1.5B", 2, 4, 8, 2),
    ("DeepSeek-R1-Distill-Qwen-1.5B", 2, 2, 4, 4),  # two k/v heads, each on two engine ranks
    *((name, 4, 4, 4, 2) for name in REAL_SHAPES if "1.5B" not in name),
    *((name, 8, 2, 1, 1) for name in ("DeepSeek-R1-Distill-Qwen-32B", "Qwen2.5-72B")),
    *((name, 4, 4, 1, 1) for name in ("DeepSeek-R1-Distill-Qwen-7B", "Qwen3-30B-A3B")),
]


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
@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize(("model", "tp", "pp", "dp", "engine_tp"), REAL)
def test_every_byte_is_written_once_on_every_rank(
    model: str, tp: int, pp: int, dp: int, engine_tp: int, pull: bool
) -> None:
    """Of few layers, experts and replicas: the others are like them."""
    shape, dp = replace(REAL_SHAPES[model], num_layers=pp), min(dp, 2)
    if shape.moe is not None:
        shape = replace(shape, moe=replace(shape.moe, num_experts=16))
    trainer, engine = both_sides(shape, tp, pp, dp, engine_tp)
    sources, targets = (engine, trainer) if pull else (trainer, engine)
    world_size, bucket = tp * pp * dp, 256 * MIB
    schedules = schedules_of(
        sources, targets, world_size=world_size, itemsize=2, bucket_bytes=bucket
    )
    check_schedule(
        schedules, sources, targets, world_size=world_size, itemsize=2, bucket_bytes=bucket
    )


@pytest.mark.slow
@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize(("model", "tp", "pp", "dp", "engine_tp"), REAL)
def test_no_rank_sends_much_more_than_some_rank_must(
    model: str, tp: int, pp: int, dp: int, engine_tp: int, pull: bool
) -> None:
    shape = REAL_SHAPES[model]
    if shape.moe is not None:  # 128 experts a layer: a quarter of the layers has enough to balance
        shape = replace(shape, num_layers=shape.num_layers // 4)
    trainer, engine = both_sides(shape, tp, pp, dp, engine_tp)
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


@pytest.mark.slow
@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("etp", [1, 4])
def test_experts_over_ranks_reach_engines_of_two_ranks(etp: int, pull: bool) -> None:
    """EP 8 x TP 4 on 32 ranks, 16 engines. Of few layers: the others are like them."""
    shape = replace(REAL_SHAPES["Qwen3-30B-A3B"], num_layers=2)
    trainer, engine = both_sides(shape, 4, 1, 8, 2, ep=8, etp=etp)
    sources, targets = (engine, trainer) if pull else (trainer, engine)
    schedules = schedules_of(sources, targets, world_size=32, itemsize=2, bucket_bytes=256 * MIB)
    least = least_bytes(sources, targets)
    assert 0 < least <= max(traffic(schedules, 2)[0]) <= 1.10 * least
    check_schedule(schedules, sources, targets, world_size=32, itemsize=2, bucket_bytes=256 * MIB)


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


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_an_engine_may_hold_a_tied_embedding_twice(pull: bool) -> None:
    trainer, engine = both_sides(SHAPES["qwen2_tied"], 1, 2, 2, 2)
    twice = [replace(h, parameters=(*h.parameters, tied_head(h.parameters))) for h in engine]
    sources, targets = (twice, trainer) if pull else (trainer, twice)
    schedules = schedules_of(sources, targets, world_size=4, itemsize=2, bucket_bytes=30_000)
    check_schedule(schedules, sources, targets, world_size=4, itemsize=2, bucket_bytes=30_000)


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


def one(name: str, rect: Rect, ranks: tuple[int, ...]) -> Placement:
    """A placement of one parameter that is one rectangle of HF tensor `x`."""
    shape = (rect.row1 - rect.row0, rect.col1 - rect.col0)
    part = Copy(rect, Rect(name, 0, shape[0], 0, shape[1]))
    return Placement(ranks, (Parameter(name, shape, (part,), shape[0]),))


def test_a_row_larger_than_a_bucket_has_a_round_of_its_own() -> None:
    sources, targets = (
        [one("a", Rect("x", 0, 3, 0, 100), (0,))],
        [one("b", Rect("x", 0, 3, 0, 100), (1,))],
    )
    schedules = schedules_of(sources, targets, world_size=2, itemsize=4, bucket_bytes=399)
    check_schedule(schedules, sources, targets, world_size=2, itemsize=4, bucket_bytes=400)
    assert len(schedules[0].rounds) == 3
    schedule = make_schedule(sources, targets, rank=0, itemsize=4, bucket_bytes=1200)
    assert len(schedule.rounds) == 1


def test_what_the_sources_lack_is_named() -> None:
    trainer, engine = both_sides(SHAPES["qwen2"], 2, 1, 1, 1)
    schedule = partial(make_schedule, rank=0, itemsize=2, bucket_bytes=MIB)
    lost = next(
        n for n, p in enumerate(trainer[0].parameters) if p.name.endswith("0.mlp.linear_fc2.weight")
    )
    with pytest.raises(ValueError, match=r"do not hold all of model\.layers\.0\.mlp\.down_proj"):
        schedule(shorter(trainer, lost), engine)
    with pytest.raises(ValueError, match=r"do not hold all of lm_head\.weight"):
        schedule(shorter(trainer, len(trainer[0].parameters) - 1), engine)


def test_a_parameter_with_a_hole_is_refused() -> None:
    schedule = partial(make_schedule, rank=0, itemsize=2, bucket_bytes=MIB)
    full = one("b", Rect("x", 0, 4, 0, 8), (2,)).parameters[0]
    hole = replace(full, shape=(5, 8), padding_row=5)
    with pytest.raises(ValueError, match="the parts of b do not fill it"):
        schedule([one("a", Rect("x", 0, 4, 0, 8), (0,))], [Placement((2,), (hole,))])


def test_what_many_hold_evens_out_what_few_hold() -> None:
    """Of 31 rows to send, seven only rank 0 has; a fourth of all is more than that."""

    def columns(ranks: tuple[int, ...], **heights: int) -> Placement:
        """Vectors that are whole HF tensors."""
        return Placement(ranks, hf_parameters({name: (n,) for name, n in heights.items()}))

    sources = [columns((0,), x=12, y=7), columns((1, 2, 3), x=12)]
    targets = [columns((4,), x=12, y=7), columns((5,), x=12)]
    schedule = make_schedule(sources, targets, rank=0, itemsize=4, bucket_bytes=32 * 4)
    assert sorted(n // 4 for n in schedule.bytes_sent.values()) == [0, 0, 7, 8, 8, 8]
    routes = find_routes(sources, targets)
    assert lower_bound(routes, [route.num_elements for route in routes]) == 8
    routes = [Route((0, 1, 2, 3), (4, 5), ()), Route((0,), (4,), ()), Route((0, 1), (4, 5), ())]
    assert lower_bound(routes, [12, 7, 20]) == 24


def test_pieces_cover_their_rectangle_by_rows() -> None:
    copy = Copy(Rect("x", 3, 103, 0, 10), Rect("a", 13, 113, 5, 15))
    pieces = list(split_rows(copy, 2, 7 * 20))
    rows = [(piece.source.row0, piece.source.row1) for piece in pieces]
    assert len(rows) == 15 and rows[0][0] == 3 and rows[-1][1] == 103
    assert [start for start, _ in rows[1:]] == [stop for _, stop in rows[:-1]]
    assert max(stop - start for start, stop in rows) <= 7
    assert [(p.target.row0, p.target.row1) for p in pieces] == [(a + 10, b + 10) for a, b in rows]
    assert {(p.source.col0, p.source.col1, p.target.col0) for p in pieces} == {(0, 10, 5)}
    small = Copy(Rect("x", 0, 2, 5, 6), Rect("a", 0, 2, 0, 1))
    assert list(split_rows(small, 2, 7 * 20)) == [small]
