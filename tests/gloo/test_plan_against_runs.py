"""What a plan predicts of memory, against a real step of the trainer on every rank."""

import pytest
from jobs import Case
from plan_jobs import Measured, measure_rank, planned_run
from world import World

from megatron_opsft.commands.plan.activations import activation_bytes
from megatron_opsft.config import LoraConfig

TOKENS = 1024
LORA = LoraConfig(rank=16)
CASES = [
    Case(),
    Case(dtype="bfloat16", recompute="full"),
    Case(recompute="selective"),
    Case(model="qwen3_moe", recompute="selective"),
    Case(model="qwen3", tp=2, sequence_parallel=True),
    Case(model="qwen2_tied", pp=2),
    Case(dp=2, dtype="bfloat16"),
    Case(pp=4),
    Case(tp=2, pp=2, sequence_parallel=True, recompute="selective"),
    Case(pp=2, vpp=2, dp=2),
    Case(cp=2, dtype="bfloat16", recompute="full"),
    Case(cp=2, tp=2, sequence_parallel=True),
    Case(model="qwen3_moe", dp=4, ep=2, recompute="selective"),
    Case(model="qwen3_moe", tp=2, dp=2, ep=2, sequence_parallel=True),
    Case(model="qwen3_moe", tp=2, ep=2, etp=1, sequence_parallel=True),
    Case(lora=LORA),
    Case(lora=LORA, dtype="bfloat16", tp=2, sequence_parallel=True),
    Case(lora=LORA, pp=2, dp=2, recompute="full"),
    Case(lora=LORA, model="qwen3_moe"),
    Case(model="qwen3_5"),
    Case(model="qwen3_5", dtype="bfloat16"),
    Case(model="qwen3_5", recompute="selective", tp=2, sequence_parallel=True),
    Case(model="qwen3_5", recompute="full", dtype="bfloat16"),
    Case(model="qwen3_5_tied", pp=2, dp=2),
    Case(model="qwen3_5", pp=2, vpp=2, tp=2),
    Case(model="qwen3_5", lora=LORA, dtype="bfloat16"),
]


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{case}-{case.dtype}-{case.recompute}" for case in CASES]
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
