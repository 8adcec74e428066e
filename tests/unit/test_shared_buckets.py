"""Memory that two processes share: what is chosen, and by which evidence. On GPUs: tests/gpu."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from megatron_opsft.rollout.remote.buckets import SharedBuckets, refusal
from megatron_opsft.runtime.shared_memory import Address, HostAddress, HostMemory, open_shared

CPU = torch.device("cpu")


def read(address: Address) -> bytes:
    return open_shared(address, CPU).numpy().tobytes()


def test_memory_that_every_reader_reads_is_taken() -> None:
    assert refusal(HostMemory, lambda address: [read(address), read(address)]) == ""


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda address: [read(address), "peer access is not supported"], "peer access is not"),
        (lambda address: [bytes(4096)], "read something else"),
        (lambda address: [read(address)[:-1]], "read something else"),
    ],
)
def test_one_reader_that_cannot_is_enough(
    answer: Callable[[Address], list[bytes | str]], reason: str
) -> None:
    assert reason in refusal(HostMemory, answer)


def test_memory_that_cannot_be_exported_is_refused() -> None:
    def no_memory(num_bytes: int) -> HostMemory:
        raise RuntimeError("CUDA error: invalid argument\nlong trace")

    assert refusal(no_memory, lambda address: []) == "CUDA error: invalid argument"


def test_another_process_reads_what_the_address_says() -> None:
    memory = HostMemory(5)
    memory.bytes.copy_(torch.tensor([1, 2, 3, 4, 250], dtype=torch.uint8))
    assert isinstance(memory.address, HostAddress)
    script = f"print(list(open({memory.address.path!r}, 'rb').read()))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout == "[1, 2, 3, 4, 250]\n"
    memory.close()


def test_a_bucket_is_flushed_before_it_is_handed_out() -> None:
    flushed: list[int] = []

    class Counting(HostMemory):
        def flush(self) -> None:
            flushed.append(len(handed))

    handed: list[int] = []
    buckets = SharedBuckets(110, Counting)
    tensors = [(f"t{i}", torch.full((10,), float(i))) for i in range(5)]
    for info in buckets.fill(tensors):
        handed.append(info["slot"])
        memory = open_shared(info["address"], CPU)
        for name, offset in zip(info["names"], info["offsets"], strict=True):
            assert (
                memory[offset : offset + 40].view(torch.float32).tolist() == [float(name[1:])] * 10
            )
    assert handed == [0, 1, 0] and flushed == [0, 1, 2]
    buckets.close()


def test_buckets_hold_what_was_put_in() -> None:
    tensors = [(f"t{n}", torch.full((n + 1, 3), float(n))) for n in range(40)]
    tensors.append(("large", torch.arange(1000.0)))
    buckets = SharedBuckets(bucket_bytes=1000)
    seen: dict[str, torch.Tensor] = {}
    for bucket in buckets.fill(iter(tensors)):
        memory = open_shared(bucket["address"], CPU)
        for name, shape, offset in zip(
            bucket["names"], bucket["shapes"], bucket["offsets"], strict=True
        ):
            count = torch.Size(shape).numel() * 4
            raw = memory[offset : offset + count]
            seen[name] = raw.view(torch.float32).view(shape).clone()
    buckets.close()
    assert list(seen) == [name for name, _ in tensors]
    assert all(torch.equal(seen[name], tensor) for name, tensor in tensors)
