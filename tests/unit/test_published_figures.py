"""What a plan multiplies, against figures that were published or follow from published ones."""

import pytest
from plan_cases import REAL_SHAPES, make_run

from megatron_opsft.commands.plan.memory import kv_bytes_per_token
from megatron_opsft.models.architectures.shape import forward_flops

# Published parameters without the input embedding, of experts those of one token; bytes of keys
# and values of a token in bfloat16.
PUBLISHED = {
    "DeepSeek-R1-Distill-Qwen-1.5B": (1_777_088_000 - 151_936 * 1536, 28_672),
    "DeepSeek-R1-Distill-Qwen-7B": (7_615_616_512 - 152_064 * 3584, 57_344),
    "DeepSeek-R1-Distill-Qwen-32B": (32_763_876_352 - 152_064 * 5120, 262_144),
    "Qwen2.5-72B": (72_706_203_648 - 152_064 * 8192, 327_680),
    "Qwen3-8B": (8_190_735_360 - 151_936 * 4096, 147_456),
    "Qwen3-30B-A3B": (3.04e9, 98_304),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_token_takes_six_operations_a_parameter_and_its_keys_and_values(name: str) -> None:
    """Biases and norms are no products, and one token has next to no attention."""
    active, kv_bytes = PUBLISHED[name]
    assert 3 * forward_flops(REAL_SHAPES[name], [1], 1) == pytest.approx(6 * active, rel=2e-3)
    for tp in (1, 2):
        assert kv_bytes_per_token(make_run(name, 8, f"rollout.tp={tp}")) * tp == kv_bytes
