"""Memory of a GPU that another process opens (CUDA IPC); of the host: tests/unit."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from megatron_opsft.rollout.remote.buckets import SharedBuckets, cuda_memory, refusal
from megatron_opsft.runtime.shared_memory import Address, CudaAddress, open_shared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def read(address: Address, index: int) -> bytes | str:
    """In another process, on its GPU `index`."""
    try:
        return open_shared(address, torch.device("cuda", index)).cpu().numpy().tobytes()
    except RuntimeError as error:
        return str(error)


def test_another_process_reads_a_gpu_s_memory() -> None:
    """On the same GPU, and on another one where there is one."""
    new_memory = cuda_memory(torch.device("cuda", 0))
    last = torch.cuda.device_count() - 1
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        for index in {0, last}:
            reason = refusal(
                new_memory, lambda address, i=index: [other.submit(read, address, i).result()]
            )
            assert reason == "", f"GPU {index}"


def test_buckets_of_a_gpu_hold_the_tensors() -> None:
    buckets = SharedBuckets(1000, cuda_memory(torch.device("cuda", 0)))
    tensors = [(f"t{i}", torch.full((50,), float(i), device="cuda")) for i in range(20)]
    seen = []
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        for info in buckets.fill(tensors):
            assert isinstance(info["address"], CudaAddress)
            raw = other.submit(read, info["address"], 0).result()
            assert isinstance(raw, bytes), raw
            memory = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            for name, start in zip(info["names"], info["offsets"], strict=True):
                values = memory[start : start + 200].view(torch.float32)
                assert values.tolist() == [float(name[1:])] * 50
                seen.append(name)
    assert seen == [name for name, _ in tensors]
    buckets.close()
