"""Transfers between real processes: Megatron's shards into vLLM's tensors and back, bit for bit."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from jobs import Case, build
from placements import engine_placements, megatron_placements
from tiny_models import SHAPES, weights
from torch import Tensor
from vllm_weights import vllm_weights
from world import World

from megatron_opsft.models.weights.reshard import Placement
from megatron_opsft.models.weights.schedule import make_schedule
from megatron_opsft.models.weights.vllm_layout import vllm_parameters
from megatron_opsft.run.sync.transfer import Transfer


def spoiled(placements: Sequence[Placement], dtype: torch.dtype) -> dict[str, Tensor]:
    """This rank's parameters, full of NaN; of this dtype, except for what is always float32."""
    found = {}
    for placement in placements:
        if dist.get_rank() in placement.ranks:
            for name, shape, _, is_float32 in placement.parameters:
                kind = torch.float32 if is_float32 else dtype
                found[name] = torch.full(shape, torch.nan, dtype=kind)
    return found


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names whose bits differ."""
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(bits(found[name]), bits(expected[name]))]


def push_and_pull(case: Case, engine_tp: int, bucket_bytes: int) -> tuple[int, list[str]]:
    """A real Megatron model pushed twice, with other weights and in other memory the second time,
    and pulled; (rounds of the push, names of wrong parameters).
    """
    built, shape, size = build(case), SHAPES[case.model], dist.get_world_size()
    table = built.shards.table
    trainer = megatron_placements(
        table, tp=case.tp, pp=case.pp, dp=case.dp, vpp=case.vpp, ep=case.ep, etp=case.etp
    )
    engine = engine_placements(partial(vllm_parameters, table, tp_size=engine_tp), engine_tp, size)
    shards = {rule.mcore_name: tensor for rule, tensor in built.shards.parameters}
    dtype = next(iter(shards.values())).dtype
    rank = dist.get_rank()
    schedule = partial(make_schedule, rank=rank, itemsize=dtype.itemsize, bucket_bytes=bucket_bytes)
    pushed, pulled = spoiled(engine, dtype), spoiled(trainer, dtype)
    push = Transfer(schedule(trainer, engine), pushed, dtype)
    pull = Transfer(schedule(engine, trainer), pulled, dtype)
    wrong = []
    for factor in (1, -2):
        for name, shard in shards.items():
            shards[name] = shard * factor
        for name, parameter in pushed.items():
            pushed[name] = torch.full_like(parameter, torch.nan)
        push.run(shards)
        hf = {name: value.to(dtype) * factor for name, value in weights(case.model).items()}
        expected = vllm_weights(shape, hf, dist.get_rank() % engine_tp, engine_tp)
        wrong += differing(pushed, expected)
    pull.run(pushed)
    # Padding comes back as +0.0, whatever its sign was.
    wrong += differing(pulled, {name: shard + 0 for name, shard in shards.items()})
    return len(schedule(trainer, engine).sends), wrong


@pytest.mark.parametrize(
    ("case", "engine_tp"),
    [
        (Case(tp=2), 1),
        (Case(pp=2, vpp=2, dtype="bfloat16"), 2),
        (Case(model="qwen2_tied", tp=2, pp=2), 4),
        (Case(model="qwen2_tied", pp=2, dp=2, dtype="bfloat16"), 2),
        (Case(model="llama_mha", tp=4, dtype="bfloat16"), 1),
        (Case(model="qwen3_5", tp=2, pp=2, dtype="bfloat16"), 2),
        (Case(model="qwen3_5_tied", tp=2, dp=2), 1),
        (Case(model="qwen3_5_moe", tp=2, dp=2, ep=2, sequence_parallel=True), 2),
        (Case(model="qwen3_5", tp=2, pp=2, dtype="bfloat16"), 1),
        (Case(model="qwen3_5_tied", pp=2, dtype="bfloat16"), 2),
        (Case(model="qwen3_moe", tp=2, pp=2, sequence_parallel=True, dtype="bfloat16"), 2),
        (Case(model="qwen3_moe", tp=2, dp=2, ep=2, sequence_parallel=True), 4),
        (
            Case(
                model="qwen3_moe", tp=2, dp=2, ep=4, etp=1, sequence_parallel=True, dtype="bfloat16"
            ),
            2,
        ),
        (Case(model="qwen3_moe", tp=2, dp=4, ep=8, etp=1, sequence_parallel=True), 2),
    ],
    ids=str,
)
def test_push_makes_vllms_tensors_and_pull_brings_the_shards_back(
    world: World, case: Case, engine_tp: int
) -> None:
    for rounds, wrong in world.run(push_and_pull, case.world_size, case, engine_tp, 30_000):
        assert wrong == []
        assert rounds > 3


@pytest.mark.quick
@pytest.mark.parametrize("bucket_bytes", [200, 5_000, 2**28])
def test_any_size_of_the_bucket_gives_the_same(world: World, bucket_bytes: int) -> None:
    """A row has 256 bytes."""
    case = Case(model="qwen2_tied", tp=2, pp=2)
    found = world.run(push_and_pull, 4, case, 4, bucket_bytes)
    assert [wrong for _, wrong in found] == [[]] * 4
    rounds = {rounds for rounds, _ in found}
    assert rounds == {1} if bucket_bytes == 2**28 else min(rounds) > 50
