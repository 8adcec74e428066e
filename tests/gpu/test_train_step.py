"""One rank on CUDA against Hugging Face: recomputation, an objective, and the same bits again.

Plain steps, layouts and TransformerEngine's loss: tests/gpu/proof/steps.py.
"""

from dataclasses import replace

import pytest
import torch
from hf_objective import compare
from hf_reference import hf_gradient
from jobs import NUM_ROLLOUTS, Case, gradient
from lora_reference import merged_gradient
from objective_jobs import objective_gradient

from megatron_opsft.config import LoraConfig
from megatron_opsft.methods.objective import Objective, SequenceClip, TokenClip
from megatron_opsft.runtime.distributed import stop_distributed

CUDA = Case(device_name="cuda")


def gradient_errors(case: Case) -> dict[str, float]:
    """Per tensor |difference| / |expected|, in the 2-norm, against Hugging Face in float32."""
    loss, _, found = gradient(case)
    hf_loss, expected = hf_gradient(case.model, case.num_samples, NUM_ROLLOUTS, case.aggregation)
    assert found.keys() == expected.keys()
    assert loss == pytest.approx(hf_loss, rel=1e-2 if case.dtype == "bfloat16" else 1e-5)
    return {
        name: float((torch.from_numpy(found[name]) - want).norm() / want.norm())
        for name, want in expected.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["qwen2", "qwen2_tied", "qwen3", "qwen3_yarn", "llama3"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_gradient_is_hugging_face_s(dtype: str, model: str, recompute: str) -> None:
    errors = gradient_errors(replace(CUDA, dtype=dtype, model=model, recompute=recompute))
    assert max(errors.values()) < (1e-4 if dtype == "float32" else 0.1)
    assert sorted(errors.values())[len(errors) // 2] < 0.03


# In bfloat16 the routers of so small a mixture would choose other experts.
@pytest.mark.parametrize(
    ("dtype", "model"),
    [("float32", "qwen3"), ("float32", "qwen3_moe"), ("bfloat16", "qwen3")],
)
def test_gradient_of_adapters_is_that_of_merged_weights(dtype: str, model: str) -> None:
    """In bfloat16 beside TransformerEngine's layers, into which the norms are fused."""
    lora = LoraConfig(rank=4, alpha=8.0)
    case = replace(CUDA, dtype=dtype, model=model, lora=lora)
    loss, _, found = gradient(case)
    expected_loss, expected = merged_gradient(model, lora, case.num_samples)
    assert found.keys() == expected.keys()
    assert loss == pytest.approx(expected_loss, rel=1e-2 if dtype == "bfloat16" else 1e-5)
    errors = [
        float((torch.from_numpy(found[name]) - want).norm() / want.norm())
        for name, want in expected.items()
    ]
    assert max(errors) < (1e-4 if dtype == "float32" else 0.3)
    assert sorted(errors)[len(errors) // 2] < 0.05


@pytest.mark.parametrize("surrogate", [TokenClip(low=0.1, high=0.15), SequenceClip()], ids=str)
def test_float32_gradient_of_an_objective_is_hugging_face_s(
    surrogate: TokenClip | SequenceClip,
) -> None:
    case = replace(CUDA, aggregation="sequence", objective=Objective(surrogate=surrogate, beta=0.2))
    expected = compare(case, objective_gradient(case, updates=2))
    assert min(expected.too_low, expected.too_high) > 20 or isinstance(surrogate, SequenceClip)


def test_deterministic_gradient_is_the_same_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    case = replace(CUDA, dtype="bfloat16", deterministic=True)
    loss, _, first = gradient(case)
    for _ in range(4):
        stop_distributed()
        again, _, found = gradient(case)
        assert again == loss
        assert all((found[name] == first[name]).all() for name in first)
