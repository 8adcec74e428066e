"""CUDA by any name means the CPU where Megatron runs on one, or no memory at all for a plan."""

from concurrent.futures import Executor

import pytest
import torch

from megatron_opsft.runtime import cpu_compat


def devices_of_what_is_made() -> dict[str, str]:
    """The way something is made -> where it is."""
    cpu_compat.install()
    cpu_compat.install()  # changes nothing more
    cuda = torch.device("cuda", 0)
    here = torch.ones(2, device="cpu")
    made = {
        "zeros": torch.zeros(2, device="cuda"),
        "tensor": torch.tensor([1.0], device="cuda:1"),
        "randint": torch.randint(3, (2,), device=cuda),
        "current_device": torch.empty(2, device=torch.cuda.current_device()),  # noqa: TID251
        "empty_like": torch.empty_like(here, device=cuda),
        "new_zeros": here.new_zeros(2, device="cuda"),
        "to": here.to("cuda", torch.float64),
        "to by name": here.to(device=cuda),
        "cuda": here.cuda(),
        "module": next(torch.nn.Linear(2, 2).to("cuda").parameters()),
        "module.cuda": next(torch.nn.Linear(2, 2).cuda().parameters()),
        "the CPU": torch.zeros(2, device="cpu"),
        "the default": torch.zeros(2),
    }
    return {how: tensor.device.type for how, tensor in made.items()}


def devices_without_memory() -> dict[str, str]:
    cpu_compat.install()
    with cpu_compat.without_memory():
        made = {
            "zeros": torch.zeros(2, device="cuda"),
            "to": torch.zeros(2).to("cuda"),
            "the default": torch.zeros(2),
            "the CPU": torch.zeros(2, device="cpu"),
        }
    return {how: tensor.device.type for how, tensor in made.items()}


def types_told() -> tuple[str, str, bool]:
    cpu_compat.install()
    half = torch.zeros(2).type(torch.bfloat16)
    return torch.zeros(2).type(), half.type(), half.dtype is torch.bfloat16


@pytest.mark.quick
def test_a_cuda_device_is_the_cpu(elsewhere: Executor) -> None:
    found = elsewhere.submit(devices_of_what_is_made).result()
    assert len(found) == 13
    assert set(found.values()) == {"cpu"}


@pytest.mark.quick
def test_without_memory_it_is_the_meta_device(elsewhere: Executor) -> None:
    found = elsewhere.submit(devices_without_memory).result()
    assert found.pop("the CPU") == "cpu"
    assert set(found.values()) == {"meta"}


@pytest.mark.quick
def test_types_are_told_as_megatron_compares_them(elsewhere: Executor) -> None:
    told = ("torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", True)
    assert elsewhere.submit(types_told).result() == told
