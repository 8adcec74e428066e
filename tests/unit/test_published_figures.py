"""What a plan multiplies, against figures that were published or follow from published ones."""

import pytest
from plan_cases import REAL_SHAPES, make_run

from megatron_opsft.commands.plan.memory import kept_state_bytes, kv_bytes_per_token
from megatron_opsft.models.architectures.shape import (
    forward_flops,
    quadratic_at,
    state_products,
    weight_flops,
)
from megatron_opsft.run.start.disk import num_parameters

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


# Parameters in billions; layers with attention and without; bytes of keys and values of a token;
# key and value heads of gated delta nets. Of 9B, files for llama.cpp hold 8.95 billion, without
# images and the layer that predicts further tokens; of 27B, the published weights 27.78 with them.
HYBRID = {
    "Qwen3.5-0.8B": (0.7524, 6, 18, 12_288, 16),
    "Qwen3.5-9B": (8.954, 8, 24, 32_768, 32),
    "Qwen3.5-27B": (26.896, 16, 48, 65_536, 48),
}


@pytest.mark.parametrize("name", HYBRID)
def test_a_hybrid_model_has_states_beside_its_keys_and_values(name: str) -> None:
    """Of 128 x 128 float32 numbers a value head, and three tokens before the convolution."""
    billions, num_attention, num_delta, kv_bytes, heads = HYBRID[name]
    shape = REAL_SHAPES[name]
    assert num_parameters(shape) == pytest.approx(billions * 1e9, rel=1e-3)
    assert (shape.num_attention_layers, shape.num_delta_layers) == (num_attention, num_delta)
    state = num_delta * (heads * 128 * 128 * 4 + 3 * (2 * 16 + heads) * 128 * 2)
    for tp in (1, 2):
        run = make_run(name, 8, f"rollout.tp={tp}")
        assert kv_bytes_per_token(run) * tp == kv_bytes
        assert kept_state_bytes(run) * tp == state
    assert kept_state_bytes(make_run(name, 8, "rollout.engine=hf")) == state
    # Twice the tokens cost twice as much, but for attention.
    once, twice = (forward_flops(shape, [length], 0) for length in (4096, 8192))
    attention = 2 * num_attention * shape.num_heads * 256 * 4096**2
    assert twice - 2 * once == pytest.approx(2 * attention)
    others = weight_flops(shape, 1, 0) + 2 * state_products(shape)
    assert others * 4096 == pytest.approx(once - attention)
    assert quadratic_at(shape) == pytest.approx(others * 4096**2 / attention)
    assert state_products(shape) == num_delta * heads * (32 * 5 * 128 + 3 * 128**2)
