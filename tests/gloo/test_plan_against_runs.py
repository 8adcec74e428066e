"""What a plan predicts of memory and operations, against real passes of the trainer."""

from dataclasses import replace

import pytest
from jobs import Case
from plan_jobs import Measured, count_operations, measure_rank, planned_run
from tiers import for_release
from tiny_models import SHAPES
from world import World

from megatron_opsft.commands.plan.activations import activation_bytes
from megatron_opsft.config import LoraConfig
from megatron_opsft.models.architectures.shape import CHUNK_LENGTH, state_products, weight_flops
from megatron_opsft.models.weights.slicing import padded_vocab_size

TOKENS = 1024
LORA = LoraConfig(rank=16)
CASES = [
    Case(),
    Case(dtype="bfloat16", recompute="full"),
    Case(recompute="selective"),
    Case(model="qwen3_moe", recompute="selective"),
    Case(model="qwen3", tp=2, sequence_parallel=True),
    Case(model="qwen2_tied", pp=2),
    Case(tp=2, pp=2, sequence_parallel=True, recompute="selective"),
    Case(pp=2, vpp=2, dp=2),
    Case(cp=2, dtype="bfloat16", recompute="full"),
    Case(model="qwen3_moe", tp=2, dp=2, ep=2, sequence_parallel=True),
    Case(model="qwen3_moe", tp=2, ep=2, etp=1, sequence_parallel=True),
    Case(lora=LORA, dtype="bfloat16", tp=2, sequence_parallel=True),
    Case(lora=LORA, pp=2, dp=2, recompute="full"),
    Case(model="qwen3_5"),
    Case(model="qwen3_5", recompute="selective", tp=2, sequence_parallel=True),
    Case(model="qwen3_5", pp=2, vpp=2, tp=2),
    Case(model="qwen3_5", lora=LORA, dtype="bfloat16"),
    Case(model="qwen3_5_moe", dtype="bfloat16", recompute="selective"),
    Case(model="qwen3_5_moe", lora=LORA, recompute="full"),
    Case(model="qwen3_5_moe", tp=2, dp=2, ep=2, sequence_parallel=True),
]
COMBINED = [
    Case(dp=2, dtype="bfloat16"),
    Case(pp=4),
    Case(cp=2, tp=2, sequence_parallel=True),
    Case(model="qwen3_moe", dp=4, ep=2, recompute="selective"),
    Case(lora=LORA),
    Case(lora=LORA, model="qwen3_moe"),
    Case(model="qwen3_5", dtype="bfloat16"),
    Case(model="qwen3_5", recompute="full", dtype="bfloat16"),
    Case(model="qwen3_5_tied", pp=2, dp=2),
    Case(model="qwen3_5", lora=LORA, recompute="selective", pp=2),
    Case(model="qwen3_5_moe"),
    Case(model="qwen3_5_moe", lora=LORA),
    Case(model="qwen3_5_moe", lora=LORA, dtype="bfloat16", recompute="selective"),
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *for_release(COMBINED)],
    ids=[f"{case}-{case.dtype}-{case.recompute}" for case in CASES + COMBINED],
)
def test_memory_is_as_predicted(world: World, case: Case) -> None:
    run = planned_run(case, TOKENS)
    num_microbatches = 4 if case.pp > 1 else 2  # as many as are in flight at once, and one more
    ranks: list[Measured] = world.run(measure_rank, case.world_size, case, TOKENS, num_microbatches)
    for rank in ranks:
        stage = run.stages[rank.pp_rank]
        assert stage.num_parameters == rank.num_parameters
        # Megatron pads its buffers, of these tiny parameters by a little more than of real ones.
        assert stage.weight_bytes <= rank.weights < 1.01 * stage.weight_bytes
        assert stage.gradient_bytes <= rank.gradients < 1.01 * stage.gradient_bytes
        assert rank.optimizer == pytest.approx(stage.optimizer_bytes, rel=0.01)
        kept, moment, loss = activation_bytes(run, stage, num_microbatches)
        assert kept + max(moment, loss) == pytest.approx(rank.activations, rel=0.1)


@pytest.mark.parametrize("model", ["qwen3", "qwen3_5", "qwen3_5_moe"])
def test_operations_are_those_that_torch_counts(world: World, model: str) -> None:
    """The output layer has padding. torch counts neither the convolution of a gated delta net nor
    its triangular systems, and products whose other half is masked it counts whole.
    """
    shape = SHAPES[model]
    (counted,) = world.run(count_operations, 1, Case(model=model), TOKENS)
    padded = replace(shape, vocab_size=padded_vocab_size(shape.vocab_size))
    expected = weight_flops(padded, TOKENS, TOKENS)
    if delta := shape.delta:
        convolutions = shape.num_delta_layers * delta.conv_size * delta.conv_channels
        expected -= 2 * TOKENS * convolutions
        heads = shape.num_delta_layers * delta.num_value_heads
        masked = CHUNK_LENGTH / 2 * (2 * delta.key_head_dim + delta.value_head_dim)
        solutions = CHUNK_LENGTH / 2 * (delta.key_head_dim + delta.value_head_dim)
        products = state_products(shape) + heads * (masked - solutions)
        num_tokens = TOKENS * CHUNK_LENGTH // 32  # sequences of 32 tokens, each in a chunk
        assert counted["aten.bmm"] == 2 * num_tokens * products
    assert counted["aten.mm"] == expected
