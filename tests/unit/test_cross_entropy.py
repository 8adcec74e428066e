"""Which cross-entropy a run takes, and what it may cost."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_memory import LiveMemory
from te_cross_entropy import install_stand_in

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.device import Device
from megatron_opsft.trainer.loss import cross_entropy
from megatron_opsft.trainer.loss.cross_entropy import summed_loss, te_problem
from megatron_opsft.trainer.loss.fused_linear import fused_linear_loss
from megatron_opsft.trainer.loss.loss_memory import (
    choose_cross_entropy,
    fused_linear_bytes,
    tokens_per_chunk,
    whole_logits_bytes,
)
from megatron_opsft.trainer.loss.output_head import OutputHead
from megatron_opsft.trainer.loss.token_losses import WeightedLikelihood

CPU = Device(torch_device=torch.device("cpu"), backend="gloo")
CUDA = Device(torch_device=torch.device("cuda", 0), backend="nccl")


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    from megatron.core import parallel_state

    install_stand_in()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def head_of(weight_VH: torch.Tensor, vocab_size: int) -> OutputHead:
    return OutputHead(weight_VH=weight_VH, vocab_size=vocab_size, group=dist.group.WORLD)


@pytest.mark.parametrize(
    ("version", "dtype", "tokens", "method", "reason"),
    [
        ((2, 20), "bfloat16", 4096, "te", "TransformerEngine is there, and all logits take 1.2 GB"),
        ((2, 20), "bfloat16", 65536, "fused_linear", "all logits of a micro-batch .* 19.9 GB"),
        ((2, 19), "bfloat16", 4096, "fused_linear", "TransformerEngine is 2.19, before 2.20"),
        ((2, 20), "float32", 4096, "fused_linear", "computes in float32"),
        (None, "bfloat16", 4096, "fused_linear", "cannot be imported"),
        ("cpu", "bfloat16", 4096, "fused_linear", "needs CUDA"),
    ],
)
def test_auto_says_which_and_why(
    monkeypatch: pytest.MonkeyPatch,
    version: Any,
    dtype: str,
    tokens: int,
    method: str,
    reason: str,
) -> None:
    monkeypatch.setattr(cross_entropy, "transformer_engine_version", lambda device: version)
    problem = te_problem(CPU if version == "cpu" else CUDA, dtype)
    sizes = {"max_tokens": tokens, "rows_per_rank": 151_936}
    found = choose_cross_entropy("auto", problem, **sizes)
    assert found.kind == method and re.search(reason, found.reason)
    named = choose_cross_entropy("fused_linear", problem, **sizes)
    assert named.reason == "as train.cross_entropy says"
    if problem:
        with pytest.raises(UserError, match=rf"train\.cross_entropy=te: .*{reason}.*auto"):
            choose_cross_entropy("te", problem, **sizes)


def run_loss(weight: Any, hidden: torch.Tensor, chunk_tokens: int | None = None) -> torch.Tensor:
    loss, _ = fused_linear_loss(
        hidden,
        head_of(weight, len(weight)),
        torch.arange(len(hidden)),
        torch.zeros(len(hidden), dtype=torch.int64),
        WeightedLikelihood(torch.ones(len(hidden))),
        chunk_tokens=chunk_tokens,
    )
    return loss


def test_a_main_gradient_takes_no_factor_and_nothing_without_gradient() -> None:
    weight: Any = torch.nn.Parameter(torch.randn(16, 8))
    weight.main_grad = torch.zeros(16, 8)
    with torch.no_grad():
        run_loss(weight, torch.randn(3, 8))
    assert not weight.main_grad.any()
    with pytest.raises(RuntimeError):
        (2 * run_loss(weight, torch.randn(3, 8, requires_grad=True))).backward()


@pytest.mark.parametrize(
    ("dtype", "num_tokens"), [(torch.float32, 512), (torch.bfloat16, 2048)], ids=str
)
def test_peak_memory_is_the_formula_s(dtype: torch.dtype, num_tokens: int) -> None:
    weight: Any = torch.nn.Parameter(torch.randn(30_000, 96, dtype=dtype))
    weight.main_grad = torch.zeros(30_000, 96)
    hidden = torch.randn(num_tokens, 96, dtype=dtype, requires_grad=True)
    with LiveMemory() as memory:
        run_loss(weight, hidden, 256)
    expected = fused_linear_bytes(
        num_tokens,
        96,
        30_000,
        dtype_bytes=dtype.itemsize,
        on_cuda=False,
        chunk_tokens=256,
    )
    # The formula has room for the largest scratch memory; here it may be smaller.
    assert expected - 12 * 2**20 < memory.peak_bytes < expected * 1.05


def test_a_chunk_of_logits_is_smaller_on_a_cpu() -> None:
    assert tokens_per_chunk(151_936, on_cuda=True) == 2**29 // (4 * 151_936) == 883
    assert tokens_per_chunk(151_936, on_cuda=False) == 2**27 // (4 * 151_936) == 220
    assert tokens_per_chunk(151_936, on_cuda=True, with_teacher=True) == 441
    assert tokens_per_chunk(10**8, on_cuda=True) == 16


def test_peak_memory_of_whole_logits_is_the_formula_s() -> None:
    weight: Any = torch.nn.Parameter(torch.randn(30_000, 96))
    hidden = torch.randn(512, 96, requires_grad=True)
    labels, losses = torch.zeros(512, dtype=torch.int64), WeightedLikelihood(torch.ones(512))
    with LiveMemory() as memory:
        head = head_of(weight, 30_000)
        loss, _ = summed_loss("te", hidden, head, torch.arange(512), labels, losses)
        loss.backward()
    expected = whole_logits_bytes(512, 96, 30_000, dtype_bytes=4)
    assert memory.peak_bytes == pytest.approx(expected, rel=0.1)
