"""The fused linear loss against float64 autograd on whole logits, over tensor-parallel ranks."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from objective_cases import OBJECTIVES, losses_with_past
from te_cross_entropy import install_stand_in
from torch import Tensor
from world import World

from megatron_opsft.config import ParallelConfig
from megatron_opsft.methods.objective import LIKELIHOOD, Objective
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.distributed import start_distributed
from megatron_opsft.trainer.loss.cross_entropy import CrossEntropyKind, summed_loss
from megatron_opsft.trainer.loss.fused_linear import fused_linear_loss, token_statistics
from megatron_opsft.trainer.loss.output_head import OutputHead, whole_hidden
from megatron_opsft.trainer.loss.token_losses import TokenLosses

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}  # of each tensor's largest entry
TOKENS, HIDDEN = 24, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """num_losses: R, spread over the tokens; main_grad: as a data-parallel wrapper gives one."""

    tp: int = 1
    vocab_size: int = 100
    num_losses: int = 13
    tokens: int | None = None
    dtype: torch.dtype = torch.float32
    main_grad: bool = True
    sequence_parallel: bool = False
    scale: float = 1.0
    objective: Objective = LIKELIHOOD


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden [T, H]; weight [vocabulary, H], without padding; positions, labels, weights [R]."""
    draw, size = torch.Generator().manual_seed(0), case.num_losses
    positions = torch.randperm(TOKENS, generator=draw)[:size].sort().values
    weight = torch.randn(case.vocab_size, HIDDEN, generator=draw) * case.scale
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw).to(case.dtype)
    labels = torch.randint(case.vocab_size, (size,), generator=draw)
    weights = torch.rand(size, generator=draw) + 0.5
    return hidden, (weight / 3).to(case.dtype), positions, labels, weights


def shard_rows(case: Case) -> int:
    """Of one rank; padded as the vocabulary is, to a multiple of 16 here."""
    return -(-case.vocab_size // (16 * case.tp)) * 16


def head_of(case: Case, weight: Tensor, group: Any) -> OutputHead:
    """This rank's rows; padding is full of values that would be noticed."""
    rows = shard_rows(case)
    own = torch.full((rows, HIDDEN), 1e3, dtype=case.dtype)
    mine = weight[group.rank() * rows : (group.rank() + 1) * rows]
    own[: len(mine)] = mine
    return OutputHead(
        weight_VH=torch.nn.Parameter(own),
        vocab_size=case.vocab_size,
        group=group,
        temperature=case.objective.temperature,
    )


def losses_of(case: Case, dtype: torch.dtype = torch.float32) -> TokenLosses:
    """Of three responses, with log-probabilities that some models before might have had."""
    hidden, weight, positions, labels, weights = inputs(case)
    first, second = case.num_losses // 4, case.num_losses // 2
    lengths = [first, second, case.num_losses - first - second]
    logits = hidden[positions].double() @ weight.double().T / case.objective.temperature
    log_probs = -F.cross_entropy(logits, labels, reduction="none")
    draw = torch.Generator().manual_seed(7)
    old, reference = (log_probs + 0.3 * torch.randn(len(log_probs), generator=draw) for _ in "ab")
    return losses_with_past(
        case.objective, lengths, weights, old=old, reference=reference, dtype=dtype
    )


def join(case: Case) -> Any:
    from megatron.core import parallel_state

    start_distributed(select_device("cpu"), ParallelConfig(tp=case.tp))
    return parallel_state.get_tensor_model_parallel_group()


def results_of(cases: list[Case], method: CrossEntropyKind) -> list[Any]:
    """`loss_and_gradients` of each, in one job: all have one tensor-parallel size."""
    group = join(cases[0])
    install_stand_in()
    return [loss_and_gradients(case, method, group) for case in cases]


def loss_and_gradients(case: Case, method: CrossEntropyKind, group: Any) -> Any:
    """(loss, gradient of the hidden states, of this rank's rows), and that padding got none."""
    hidden, all_rows, positions, labels, _ = inputs(case)
    head = head_of(case, all_rows, group)
    weight: Any = head.weight_VH
    if case.main_grad:
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)  # adds, never overwrites
        weight.grad_added_to_main_grad = False
    hidden.requires_grad_()
    own = hidden.chunk(case.tp)[group.rank()] if case.sequence_parallel else hidden
    whole = whole_hidden(own, group, sequence_parallel=case.sequence_parallel)
    losses = losses_of(case)
    if method == "fused_linear":
        loss, found = fused_linear_loss(
            whole, head, positions, labels, losses, chunk_tokens=case.tokens
        )
        assert not found.log_probs_R.requires_grad
    else:
        loss, _ = summed_loss(method, whole, head, positions, labels, losses)
    loss.backward()
    if case.main_grad and method == "fused_linear":
        assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
        grad_weight = weight.main_grad - 1.0
    else:
        assert weight.grad.dtype == case.dtype
        grad_weight = weight.grad.float()
    assert hidden.grad is not None and hidden.grad.dtype == case.dtype
    if case.main_grad:
        assert not grad_weight[head.num_rows :].any()
    return loss.item(), hidden.grad.float().numpy(), grad_weight[: head.num_rows].numpy()


def float64_autograd(case: Case) -> tuple[float, Tensor, Tensor]:
    hidden, weight, positions, labels, _ = inputs(case)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden[positions] @ weight.T / case.objective.temperature
    log_probs = -F.cross_entropy(logits, labels, reduction="none")
    loss = losses_of(case, torch.float64)(log_probs).sum()
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.item(), hidden.grad, weight.grad


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference / largest entry."""
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def check(case: Case, results: list[Any]) -> None:
    """results: of all ranks."""
    loss, grad_hidden, grad_weight = float64_autograd(case)
    limit = LIMITS[case.dtype]
    for found_loss, _, _ in results:
        assert found_loss == pytest.approx(loss, rel=limit), case
    hidden = [torch.from_numpy(part) for _, part, _ in results]
    if case.sequence_parallel:  # each rank has its own tokens' gradient
        hidden = [torch.stack(hidden).sum(0)]
    for part in hidden:
        assert error(part, grad_hidden) < limit, case
    found_weight = torch.cat([torch.from_numpy(part) for _, _, part in results])
    assert error(found_weight, grad_weight) < limit, case


def check_all(world: World, cases: list[Case], method: CrossEntropyKind) -> None:
    if cases:
        found = world.run(results_of, cases[0].tp, cases, method)
        for case, *results in zip(cases, *found, strict=True):
            check(case, results)


def cases(tp: int) -> dict[str, list[Case]]:
    one, halves = Case(tp=tp), (None, 5)
    # With 4 ranks some have nothing but padding.
    sizes = ((1, True), (16, False), (17, True), (99, False), (128, True))
    return {
        "chunks": [replace(one, dtype=d, tokens=t) for d in LIMITS for t in (None, 1, 5, 100)],
        "vocabulary": [replace(one, vocab_size=n, tokens=5, main_grad=m) for n, m in sizes],
        "response tokens": [
            replace(one, num_losses=n, tokens=t) for n in (0, 1, TOKENS) for t in halves
        ],
        "sequence parallelism": [
            replace(one, dtype=d, sequence_parallel=True) for d in LIMITS if tp > 1
        ],
        "flat and peaked": [replace(one, scale=scale) for scale in (0.0, 30.0)],
        "objectives": [replace(one, tokens=t, objective=o) for t in halves for o in OBJECTIVES],
    }


def whole_logits_cases(tp: int) -> list[Case]:
    one = Case(tp=tp, main_grad=False)
    found = [replace(one, num_losses=n) for n in (0, 1, 13)]
    found += [replace(one, objective=o) for o in OBJECTIVES]
    return found + [replace(one, sequence_parallel=True)] * (tp > 1)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", cases(1))
def test_loss_and_gradients_equal_float64_autograd(world: World, kind: str, tp: int) -> None:
    check_all(world, cases(tp)[kind], "fused_linear")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_those_of_whole_logits_equal_float64_autograd(world: World, tp: int) -> None:
    check_all(world, whole_logits_cases(tp), "te")


def statistics_of(cases: list[Case]) -> list[Any]:
    """(log-probs, entropy) of each."""
    group = join(cases[0])
    found = []
    for case in cases:
        hidden, weight, positions, labels, _ = inputs(case)
        head = head_of(case, weight, group)
        own = token_statistics(
            hidden, head, positions, labels, entropy=True, chunk_tokens=case.tokens
        )
        found.append((own.log_probs_R, own.entropy_R))
    return found


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_log_probs_and_entropy_equal_float64(world: World, tp: int) -> None:
    pairs = [(None, 1.0), (5, 30.0)]
    cases = [Case(tp=tp, tokens=t, scale=scale, vocab_size=99) for t, scale in pairs]
    for case, *results in zip(cases, *world.run(statistics_of, tp, cases), strict=True):
        hidden, weight, positions, labels, _ = inputs(case)
        log_p = (hidden[positions].double() @ weight.double().T).log_softmax(-1)
        expected = (log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(1))
        # The logits themselves are float32, up to 200 where the scale is 30.
        for found, want in zip([r for rank in results for r in rank], expected * tp, strict=True):
            torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=2e-6 * case.scale)
