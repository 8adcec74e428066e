"""Whose gated delta net a run trains with, and what the log says of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import SHAPES

from megatron_opsft.config import ParallelConfig, TrainConfig
from megatron_opsft.runtime.device import Device
from megatron_opsft.trainer.loss.loss_memory import CrossEntropy
from megatron_opsft.trainer.model import transformer_config
from megatron_opsft.trainer.model.delta_net import GatedDeltaNet
from megatron_opsft.trainer.model.delta_spec import PLAIN_PARTS, delta_net_spec
from megatron_opsft.trainer.model.transformer_config import describe_parts, why_own_delta_net

CPU = Device(torch_device=torch.device("cpu"), backend="gloo")
CUDA = Device(torch_device=torch.device("cuda", 0), backend="nccl")
LOSS = CrossEntropy(kind="fused_linear", reason="chosen")


@pytest.mark.parametrize(
    ("device", "bf16", "deterministic", "why_no_kernels", "why_own"),
    [
        (CUDA, True, False, None, None),
        (CUDA, False, False, None, "flash-linear-attention is not for float32"),
        (CUDA, True, True, None, "flash-linear-attention is not deterministic"),
        (CUDA, True, False, "no kernels", "no kernels"),
        (CPU, False, False, "they need CUDA", "they need CUDA"),
    ],
)
def test_megatron_s_is_for_bfloat16_on_a_gpu_that_has_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
    device: Device,
    bf16: bool,
    deterministic: bool,
    why_no_kernels: str | None,
    why_own: str | None,
) -> None:
    monkeypatch.setattr(transformer_config, "why_no_delta_kernels", lambda _: why_no_kernels)
    monkeypatch.setattr(transformer_config, "has_transformer_engine", lambda _: False)
    config: Any = SimpleNamespace(
        bf16=bf16,
        deterministic_mode=deterministic,
        linear_attention_freq=[1, 0],
        gradient_accumulation_fusion=False,
    )
    assert why_own_delta_net(config, device) == why_own
    said = f"plain torch ({why_own})" if why_own else "flash-linear-attention"
    assert f"); gated delta nets: {said}; cross-entropy" in describe_parts(config, LOSS, device)
    config.linear_attention_freq = None
    assert "gated delta nets" not in describe_parts(config, LOSS, device)


def test_on_a_cpu_it_is_ours_of_plain_parts() -> None:
    config = transformer_config.transformer_config(
        SHAPES["qwen3_5"],
        dtype="bfloat16",
        parallel=ParallelConfig(),
        train=TrainConfig(),
        device=CPU,
    )
    spec = delta_net_spec(config, CPU, PLAIN_PARTS)
    assert spec.module is GatedDeltaNet and spec.submodules is PLAIN_PARTS
