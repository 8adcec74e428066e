"""One rank on CUDA against the CPU: TransformerEngine's layers, and the float32 path.

What the CPU computes is compared with Hugging Face in tests/gloo.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hf_objective import compare
from hf_reference import hf_gradient
from jobs import NUM_ROLLOUTS, OPTIMIZER, Case, build, exported, gradient, train_steps
from objective_jobs import objective_gradient

from megatron_opsft.methods.objective import Objective, SequenceClip, TokenClip
from megatron_opsft.runtime.device import has_transformer_engine, select_device
from megatron_opsft.runtime.distributed import stop_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = Case(device_name="cuda")
MODELS = ["qwen2", "qwen2_tied", "qwen3", "llama3"]


@pytest.fixture(autouse=True)
def _leave_groups() -> Iterator[None]:
    yield
    stop_distributed()


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


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_float32_gradient_is_hugging_face_s(model: str, recompute: str) -> None:
    errors = gradient_errors(replace(CUDA, model=model, recompute=recompute))
    assert max(errors.values()) < 1e-4


@pytest.mark.parametrize("surrogate", [TokenClip(low=0.1, high=0.15), SequenceClip()], ids=str)
def test_float32_gradient_of_an_objective_is_hugging_face_s(
    surrogate: TokenClip | SequenceClip,
) -> None:
    case = replace(CUDA, aggregation="sequence", objective=Objective(surrogate=surrogate, beta=0.2))
    expected = compare(case, objective_gradient(case, updates=2))
    assert min(expected.too_low, expected.too_high) > 20 or isinstance(surrogate, SequenceClip)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_bfloat16_gradient_is_near_hugging_face_s(model: str, recompute: str) -> None:
    check_bfloat16(replace(CUDA, model=model, recompute=recompute))


def test_bfloat16_gradient_of_transformer_engine_s_loss_is_near_hugging_face_s() -> None:
    if not has_transformer_engine(select_device("cuda")):
        pytest.skip("needs TransformerEngine")
    for model in ("qwen2", "qwen2_tied"):
        check_bfloat16(replace(CUDA, model=model, cross_entropy="te"))
        stop_distributed()


def check_bfloat16(case: Case) -> None:
    errors = gradient_errors(replace(case, dtype="bfloat16"))
    assert max(errors.values()) < 0.1
    assert sorted(errors.values())[len(errors) // 2] < 0.03


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


def test_three_steps_lower_the_loss_and_change_what_is_exported() -> None:
    case = replace(CUDA, dtype="bfloat16")
    built = build(case)
    before = exported(built)
    results = [train_steps(built, case, range(1))[0] for _ in range(3)]
    assert results[0].loss > results[1].loss > results[2].loss
    after = exported(built)
    assert before.keys() == after.keys()
    largest = max(float((after[name] - before[name]).abs().max()) for name in after)
    assert 0 < largest < 10 * OPTIMIZER.lr
