"""Gated delta nets on CUDA: ours against the CPU, and Megatron-Core's, with
flash-linear-attention's kernels, against ours.
"""

from dataclasses import replace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from tiny_models import QWEN3_5
from torch import Tensor, nn

from megatron_opsft.config import ParallelConfig, TrainConfig
from megatron_opsft.models.architectures.shape import DeltaShape
from megatron_opsft.runtime.device import Device, select_device, why_no_delta_kernels
from megatron_opsft.runtime.distributed import start_distributed
from megatron_opsft.trainer.model.delta_net import GatedDeltaNet
from megatron_opsft.trainer.model.delta_spec import PLAIN_PARTS
from megatron_opsft.trainer.model.transformer_config import transformer_config

LENGTHS = (1, 5, 64, 130)
# Heads as large as those of real models.
SHAPE = replace(
    QWEN3_5,
    delta=DeltaShape(
        num_key_heads=2, num_value_heads=4, key_head_dim=128, value_head_dim=128, conv_size=4
    ),
)
SECTIONS = {"query": 256, "key": 256, "value": 512, "z": 512, "beta": 4, "alpha": 4}  # of in_proj
# Relative to float32, of a whole tensor. In bfloat16 rounding the operands of the linear layers
# alone takes 0.007. The kernels also round queries, keys, and products inside a chunk; a gradient
# that is computed wrongly is tens of percent off.
LIMITS = {"float32": 1e-4, "bfloat16": 0.02}
KERNEL_LIMIT = 0.05


def net(device: Device, dtype: str, module: type) -> nn.Module:
    """A net with weights of its own; those of every device and dtype are the same."""
    config = transformer_config(
        SHAPE, dtype=dtype, parallel=ParallelConfig(), train=TrainConfig(), device=device
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    made: nn.Module = module(config, PLAIN_PARTS, layer_number=1, pg_collection=groups)
    made.to(device.torch_device)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in made.named_parameters():
        values = 0.1 * torch.randn(parameter.shape, generator=generator)
        if name == "out_norm.weight":
            values += 1.0
        if name == "A_log":
            values -= 2.0
        parameter.data.copy_(values.bfloat16())
    return made


def results(device: Device, dtype: str, module: type) -> dict[str, Tensor]:
    """The output for a pack, its gradient by the input and by each section of each weight."""
    made = net(device, dtype, module)
    generator = torch.Generator().manual_seed(1)
    shape = (sum(LENGTHS), 1, SHAPE.hidden_size)
    hidden, weights = (
        torch.randn(shape, generator=generator).bfloat16().to(device.torch_device) for _ in range(2)
    )
    hidden = hidden.to(next(made.parameters()).dtype).requires_grad_()
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).to(device.torch_device, torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
    )
    output, _ = made(hidden, attention_mask=None, packed_seq_params=packed)
    (output.float() * weights.float()).sum().backward()
    found = {"output": output.detach(), "input": hidden.grad}
    for name, parameter in made.named_parameters():
        found[name] = parameter.grad
    rows = found.pop("in_proj.weight").split([*SECTIONS.values()])
    found |= zip(SECTIONS, rows, strict=True)
    return {name: value.float().cpu() for name, value in found.items()}


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    assert found.keys() == expected.keys() and len(found) == 13
    errors = {n: float((found[n] - value).norm() / value.norm()) for n, value in expected.items()}
    assert max(errors.values()) < limit, errors


@pytest.fixture
def cuda() -> Device:
    device = select_device("cuda")
    start_distributed(device, ParallelConfig())
    return device


@pytest.mark.parametrize("dtype", LIMITS)
def test_ours_is_that_of_the_cpu(cuda: Device, dtype: str) -> None:
    expected = results(select_device("cpu"), "float32", GatedDeltaNet)
    compare(results(cuda, dtype, GatedDeltaNet), expected, LIMITS[dtype])


def test_megatron_s_is_ours(cuda: Device) -> None:
    if why_not := why_no_delta_kernels(cuda):
        pytest.skip(why_not)
    from megatron.core.ssm import gated_delta_net

    expected = results(cuda, "float32", GatedDeltaNet)
    compare(results(cuda, "bfloat16", gated_delta_net.GatedDeltaNet), expected, KERNEL_LIMIT)
