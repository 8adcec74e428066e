"""The pretended GPU finds what a GPU refuses or gets wrong, and computes what the CPU computes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pretend_gpu import Fault, Gpu, pretended
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with pretended(2) as found:
        yield found


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda")


class Careless(torch.autograd.Function):
    """Its backward pass makes its gradient on the CPU."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * torch.full((4,), 2.0)


def written_too_early() -> None:
    host = torch.zeros(4).pin_memory()
    host.to("cuda", non_blocking=True)
    host.fill_(1)


def unpinned_too_early() -> None:
    host = torch.zeros(4)
    torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    host.copy_(on_gpu(4), non_blocking=True)
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


def event_before_the_copy() -> None:
    event = torch.cuda.Event()
    event.record()
    host = on_gpu(4).to("cpu", non_blocking=True)
    event.synchronize()
    host.sum()


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: on_gpu(4) + torch.ones(4), "aten::add.* of the CPU with tensors of the GPU"),
    (
        lambda: Careless.apply(on_gpu(4).requires_grad_()).sum().backward(),
        "aten::mul.* of the CPU with tensors of the GPU",
    ),
    (lambda: on_gpu(4).numpy(), "numpy of a CUDA tensor"),
    (lambda: torch.empty(2, device="cuda:1"), "cuda:1 on a rank whose GPU is cuda:0"),
    (
        lambda: on_gpu(4).to("cpu", non_blocking=True).numpy(),
        "numpy of host memory that an unfinished copy from the GPU writes",
    ),
    (written_too_early, "fill_ writes host memory that an unfinished copy to the GPU reads"),
    (unpinned_too_early, "cudaHostUnregister of host memory that an unfinished copy uses"),
    (event_before_the_copy, "sum of host memory that an unfinished copy from the GPU writes"),
    (lambda: torch.mm(on_gpu(2, 2), on_gpu(2, 2), out_dtype=torch.float32), "mm of .*float32"),
    (lambda: torch.rand(2, generator=torch.Generator("cuda")), "generator is of another device"),
]


@pytest.mark.parametrize(("mistake", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_a_mistake_is_found(gpu: Gpu, mistake: Callable[[], Any], said: str) -> None:
    with pytest.raises(Fault, match=said):
        mistake()
    (fault,) = gpu.faults
    assert "test_pretend_gpu.py" in fault  # and where


WRONG_ARGUMENTS: list[Callable[[], Any]] = [
    lambda: torch.cuda.mem_get_info(gpu=0),  # type: ignore[call-arg]
    lambda: torch.cuda.Event(timing=True),  # type: ignore[call-arg]
    lambda: torch.ones(2).to("cuda", blocking=False),  # type: ignore[call-overload]
    lambda: torch.tensor([1], device="cuda", type=torch.int64),  # type: ignore[call-arg]
    lambda: dist.new_group([0], backends="nccl"),  # type: ignore[call-arg]
    lambda: torch.cuda.cudart().cudaHostRegister(ptr=0, size=8, flags=0),
]


@pytest.mark.parametrize("call", WRONG_ARGUMENTS)
def test_a_stand_in_takes_what_the_real_function_takes(gpu: Gpu, call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        call()


def test_a_mistake_in_another_thread_is_found_though_its_exception_is_lost(gpu: Gpu) -> None:
    def careless() -> None:
        with suppress(Fault):
            on_gpu(4) + torch.ones(4)

    thread = threading.Thread(target=careless)
    thread.start()
    thread.join()
    assert len(gpu.faults) == 1


def test_a_collective_takes_the_tensors_of_its_backend(gpu: Gpu) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    nccl, gloo = dist.new_group([0], backend="nccl"), dist.new_group([0], backend="gloo")
    for tensor in (torch.ones(4), on_gpu(4)):
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, group=nccl if tensor.is_cuda else gloo)
        with pytest.raises(Fault, match="a (CPU|CUDA) tensor in a group of (NCCL|Gloo)"):
            dist.all_reduce(tensor, group=gloo if tensor.is_cuda else nccl)
    dist.broadcast_object_list(["a value"], src=0, group=nccl)
    with pytest.raises(Fault, match="unfinished copy"):
        dist.all_reduce(on_gpu(4).to("cpu", non_blocking=True))
    dist.destroy_process_group()


def test_copies_are_done_after_a_synchronisation(gpu: Gpu) -> None:
    value, event = on_gpu(4), torch.cuda.Event()
    for wait in (torch.cuda.synchronize, event.synchronize, value.sum().item, value.cpu):
        host = value.to("cpu", non_blocking=True)
        assert host.is_pinned() and not host.is_cuda
        event.record()
        wait()
        assert host.sum() == 4
    assert torch.ones(4).to("cuda", non_blocking=True).is_cuda  # from memory that is not pinned


def test_torch_s_own_pinned_memory_is_blocks_of_powers_of_two_which_are_kept(gpu: Gpu) -> None:
    """As torch/include/ATen/core/CachingHostAllocator.h of torch 2.13 rounds and reuses them."""
    sizes = []
    for number in (1000, 1025, 1100):  # of float32
        host = torch.ones(number, device="cuda").to("cpu", non_blocking=True)
        sizes.append(gpu.pinned_bytes)
        torch.cuda.synchronize()
    assert sizes == [4096, 4096 + 8192, 4096 + 2 * 8192]  # the last while the one before is there
    del host
    both = torch.empty(2000, pin_memory=True), torch.zeros(2048).pin_memory()
    assert gpu.pinned_bytes == sizes[-1] and both[0].is_pinned()


def test_host_memory_is_registered_once_and_by_pages(gpu: Gpu) -> None:
    cudart, host = torch.cuda.cudart(), torch.zeros(5000, dtype=torch.uint8)
    first = host.data_ptr()
    assert cudart.cudaHostRegister(first, 5000, 0) == 0 and host[100:].is_pinned()
    assert gpu.pinned_bytes in (8192, 12288)  # as it lies
    assert cudart.cudaHostRegister(first + 4999, 1, 0) == 712  # already
    assert cudart.cudaHostUnregister(first + 1) == 713  # not
    with pytest.raises(RuntimeError, match="CUDA error 713"):
        on_gpu(4)
    assert on_gpu(4).sum() == 4
    assert cudart.cudaHostUnregister(first) == 0
    assert gpu.pinned_bytes == 0 and not host.is_pinned()


def test_a_number_is_a_device_with_any_torch(gpu: Gpu) -> None:
    assert torch.empty(2, device=torch.cuda.current_device()).is_cuda
    assert torch.zeros_like(torch.ones(2), device=0).device == torch.device("cuda", 0)
    with pytest.raises(Fault, match="cuda:1 on a rank whose GPU is cuda:0"):
        torch.ones(2, device=1)


def test_values_and_gradients_are_those_of_the_cpu(gpu: Gpu) -> None:
    """A model and its copy on the GPU, through views, indices of the CPU and recomputation."""
    models = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        layers = (torch.nn.Embedding(7, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        models.append(torch.nn.Sequential(*layers).to(device))
        ids = torch.arange(6, device=device)
        hidden = checkpoint(models[-1], ids, use_reentrant=False).view(2, 3, 8)[:, [0, 2]]
        attended = torch.nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)
        loss = (attended.softmax(-1) * torch.tensor(0.5)).square().sum()
        loss.backward()
        assert loss.is_cuda == (device == "cuda")
    for expected, found in zip(*(model.parameters() for model in models), strict=True):
        assert found.device == torch.device("cuda:0") and found.grad is not None
        assert found.grad.is_cuda and torch.equal(found.grad.cpu(), expected.grad)  # type: ignore
    assert gpu.faults == []


def test_the_gpu_has_generators_of_its_own(gpu: Gpu) -> None:
    first, again = (
        torch.rand(4, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
        for _ in range(2)
    )
    assert first.equal(again)
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    drawn = torch.rand(4), torch.rand(4, device="cuda")
    torch.set_rng_state(states[0])
    torch.cuda.set_rng_state(states[1])  # in the other order: neither changes the other
    assert torch.rand(4, device="cuda").equal(drawn[1]) and torch.rand(4).equal(drawn[0])


def test_memory_is_that_of_the_storages_on_the_gpu(gpu: Gpu) -> None:
    weights = torch.empty(1000, device="cuda")
    views = [weights[:10].view(2, 5), weights.detach(), torch.empty(10**6)]
    del torch.ones(2000, device="cuda").double().grad
    assert torch.cuda.memory_allocated() == 4000
    assert torch.cuda.max_memory_allocated() == 4000 + 8000 + 16_000
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 4000
    free, total = torch.cuda.mem_get_info()
    assert total - free == 4000
    del weights, views
    assert torch.cuda.memory_allocated() == 0


def test_torch_is_as_before_when_the_gpu_is_gone() -> None:
    before = torch.tensor, torch.Generator, torch.cuda.Event
    with pretended():
        assert torch.cuda.is_available()
    assert (torch.tensor, torch.Generator, torch.cuda.Event) == before
    assert "device" not in vars(torch.Tensor)
