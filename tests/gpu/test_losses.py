"""Token losses on CUDA against float64 autograd on whole logits, and what they cost in memory."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from objective_cases import OBJECTIVES, losses_with_past
from torch import Tensor

from megatron_opsft.config import ParallelConfig
from megatron_opsft.methods.objective import LIKELIHOOD, Objective
from megatron_opsft.runtime.device import has_transformer_engine, select_device
from megatron_opsft.runtime.distributed import start_distributed
from megatron_opsft.trainer.loss import logit_chunks
from megatron_opsft.trainer.loss.cross_entropy import CrossEntropyKind, summed_loss
from megatron_opsft.trainer.loss.fused_linear import fused_linear_loss, operations
from megatron_opsft.trainer.loss.loss_memory import fused_linear_bytes
from megatron_opsft.trainer.loss.output_head import OutputHead, Teacher
from megatron_opsft.trainer.loss.token_losses import TokenLosses, WeightedLikelihood

# Relative to float64, of a whole tensor and of its worst element: rounding a number to bfloat16
# changes it by up to 2 ** -8, and the gradient of a hidden state adds rounded gradients of
# thousands of logits.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
ELEMENT_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    # As for a float32 run: TF32 products would be compared with nothing.
    # By hand: torch computes the attribute, and monkeypatch would undo it by deleting it.
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    start_distributed(select_device("cuda"), ParallelConfig())
    yield
    matmul.allow_tf32 = before


def head_of(weight: Any, vocab_size: int) -> OutputHead:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    return OutputHead(weight_VH=weight, vocab_size=vocab_size, group=group)


def given(
    dtype: torch.dtype, tokens: int, vocab_size: int, hidden_size: int, device: str = "cuda"
) -> tuple[Tensor, Any, Tensor, Tensor]:
    """Hidden states, a weight with 64 rows of padding and a main gradient, labels, weights."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device=device, dtype=dtype, requires_grad=True)
    weight: Any = torch.nn.Parameter(
        torch.randn(vocab_size + 64, hidden_size, device=device, dtype=dtype) / hidden_size**0.5
    )
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    labels = torch.randint(vocab_size, (tokens,), device=device)
    return hidden, weight, labels, torch.rand(tokens, device=device) + 0.5


def check_close(found: Tensor, expected: Tensor, whole: float, element: float) -> None:
    """whole: limit of the relative error of the whole tensor; element: of its worst element,
    relative to the largest one.
    """
    difference = found.double() - expected
    assert difference.norm() / expected.norm() < whole
    assert difference.abs().max() / expected.abs().max() < element


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("forward", [False, True], ids=["reverse", "forward"])
def test_a_teacher_s_divergence_equals_float64_autograd(dtype: torch.dtype, forward: bool) -> None:
    vocab_size, tokens = 5003, 200
    hidden, weight, labels, weights = given(dtype, tokens, vocab_size, 256)
    of_teacher, states = weight.detach().roll(1, 0) * 0.5, (hidden.detach() + 0.1).to(dtype)
    exact, rows = (t.detach().double().requires_grad_() for t in (hidden, weight[:vocab_size]))
    log_p = (exact @ rows.T).log_softmax(-1)
    log_q = (states.double() @ of_teacher[:vocab_size].double().T).log_softmax(-1)
    drawn, to = (log_q, log_p) if forward else (log_p, log_q)
    expected = ((drawn.exp() * (drawn - to)).sum(-1) * weights.double()).sum()
    expected.backward()
    loss, _ = fused_linear_loss(
        hidden,
        head_of(weight, vocab_size),
        torch.arange(tokens, device="cuda"),
        labels,
        WeightedLikelihood(torch.zeros_like(weights)),
        teacher=Teacher(
            hidden_RH=states,
            head=head_of(of_teacher, vocab_size),
            weights_R=weights,
            forward=forward,
        ),
        chunk_tokens=64,
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=LIMITS[dtype])
    assert hidden.grad is not None and exact.grad is not None and rows.grad is not None
    limits = LIMITS[dtype], ELEMENT_LIMITS[dtype]
    check_close(hidden.grad, exact.grad, *limits)
    check_close(weight.main_grad[:vocab_size], rows.grad, *limits)


WAYS: list[tuple[CrossEntropyKind, torch.dtype]] = [
    ("fused_linear", torch.float32),
    ("fused_linear", torch.bfloat16),
    ("te", torch.bfloat16),
]


@pytest.mark.parametrize(("method", "dtype"), WAYS, ids=str)
@pytest.mark.parametrize("objective", [LIKELIHOOD, *OBJECTIVES], ids=str)
def test_an_objective_s_gradient_is_float64_autograd_s(
    method: CrossEntropyKind, dtype: torch.dtype, objective: Objective
) -> None:
    """Old and reference log-probs are far from where a clip begins, whatever bfloat16 rounds."""
    if method == "te" and not has_transformer_engine(select_device("cuda")):
        pytest.skip("needs TransformerEngine")
    check_objective(method, objective, dtype, "cuda")


def check_objective(
    method: CrossEntropyKind, objective: Objective, dtype: torch.dtype, device: str
) -> None:
    """The oracle has its losses on the CPU."""
    hidden, weight, labels, weights = given(dtype, 200, 5003, 256, device)
    if method != "fused_linear":
        del weight.main_grad
    exact, head = hidden.detach().double().cpu().requires_grad_(), weight.detach()[:5003]
    rows = head.double().cpu().requires_grad_()
    logits = exact @ rows.T / objective.temperature
    log_probs = -F.cross_entropy(logits, labels.cpu(), reduction="none")
    steps = torch.randint(-1, 2, (2, 200), generator=torch.Generator().manual_seed(0))
    past = (log_probs.detach() + 0.5 * steps).unbind()

    def losses(where: str, kind: torch.dtype) -> TokenLosses:
        old, reference = (values.to(where) for values in past)
        lengths, mine = (80, 20, 100), weights.to(where)
        return losses_with_past(objective, lengths, mine, old=old, reference=reference, dtype=kind)

    expected = losses("cpu", torch.float64)(log_probs).sum()
    expected.backward()
    output = replace(head_of(weight, 5003), temperature=objective.temperature)
    positions = torch.arange(200, device=device)
    loss, _ = summed_loss(method, hidden, output, positions, labels, losses(device, torch.float32))
    loss.backward()
    limits = (2e-2, 2e-2) if method == "te" else (LIMITS[dtype], ELEMENT_LIMITS[dtype])
    assert loss.item() == pytest.approx(expected.item(), rel=limits[0])
    found = weight.main_grad if method == "fused_linear" else weight.grad
    for own, want in ((hidden.grad, exact.grad), (found[:5003], rows.grad)):
        assert own is not None and want is not None
        check_close(own.cpu(), want, *limits)
    assert not found[5003:].any()


@pytest.mark.parametrize("with_teacher", [False, True])
@pytest.mark.parametrize("tokens", [4096, 16_384])
def test_peak_memory_is_the_formula_s(tokens: int, with_teacher: bool) -> None:
    device = select_device("cuda")
    if operations(device.torch_device) is logit_chunks:
        pytest.skip("the formula is that of the Triton version")
    vocab_size, hidden_size = 62_016, 1536
    hidden, weight, labels, weights = given(torch.bfloat16, tokens, vocab_size, hidden_size)
    positions, head = torch.arange(tokens, device="cuda"), head_of(weight, vocab_size)
    of_teacher = replace(head, weight_VH=weight.detach().clone())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    losses, teacher = WeightedLikelihood(weights), None
    if with_teacher:  # its hidden states are counted
        states = hidden.detach() + 0.1
        teacher = Teacher(hidden_RH=states, head=of_teacher, weights_R=weights)
    loss, _ = fused_linear_loss(hidden, head, positions, labels, losses, teacher=teacher)
    loss.backward()
    expected = fused_linear_bytes(
        tokens, hidden_size, len(weight), dtype_bytes=2, with_teacher=with_teacher
    )
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(expected, rel=0.05)
