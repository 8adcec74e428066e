"""Weights into memory that another process of this machine can read, in buckets."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_opsft.runtime.shared_memory import (
    Address,
    CudaMemory,
    HostMemory,
    SharedMemory,
)

_ALIGN = 64
_PROBE_BYTES = 4096

NewMemory = Callable[[int], SharedMemory]
"""Bytes -> memory of that size."""


class SharedBuckets:
    """Two buckets, filled in turn: one is read by the other process while the next is filled."""

    def __init__(self, bucket_bytes: int, new_memory: NewMemory = HostMemory) -> None:
        self._bucket_bytes = bucket_bytes
        self._new_memory = new_memory
        self._buckets: list[SharedMemory] = []

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Any]]:
        """Descriptions of filled buckets, the fields of `vllm.worker.BucketInfo`.

        A bucket must have been read when the next but one is asked for. A tensor larger than a
        bucket gets one of its own size.
        """
        number = used = 0
        info = _describe()
        for name, tensor in tensors:
            size = tensor.numel() * tensor.itemsize
            start = -(-used // _ALIGN) * _ALIGN
            if info["names"] and start + size > self._bucket_bytes:
                yield self._finish(number, info)
                number, start, info = number + 1, 0, _describe()
            memory = self._memory(number % 2, start + size).bytes
            target = memory[start : start + size].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor)
            info["names"].append(name)
            info["dtypes"].append(str(tensor.dtype).removeprefix("torch."))
            info["shapes"].append(list(tensor.shape))
            info["offsets"].append(start)
            used = start + size
        if info["names"]:
            yield self._finish(number, info)

    def _finish(self, number: int, info: dict[str, Any]) -> dict[str, Any]:
        slot = number % 2
        self._buckets[slot].flush()
        return {**info, "slot": slot, "address": self._buckets[slot].address}

    def _memory(self, slot: int, num_bytes: int) -> SharedMemory:
        while len(self._buckets) <= slot:
            self._buckets.append(self._new_memory(self._bucket_bytes))
        if self._buckets[slot].address.num_bytes < num_bytes:  # only ever while it is still empty
            self._buckets[slot].close()
            self._buckets[slot] = self._new_memory(num_bytes)
        return self._buckets[slot]

    def close(self) -> None:
        """Give the memory back."""
        for bucket in self._buckets:
            bucket.close()
        self._buckets.clear()


def cuda_memory(device: torch.device) -> NewMemory:
    """Buckets on this rank's GPU."""
    return lambda num_bytes: CudaMemory(num_bytes, device)


def refusal(new_memory: NewMemory, read: Callable[[Address], list[bytes | str]]) -> str:
    """Why the readers cannot use such memory; "" where each has read what was written there.

    read: asks every reader for the bytes at an address; a str says why one cannot read.
    """
    try:
        memory = new_memory(_PROBE_BYTES)
    except RuntimeError as error:  # the driver's: memory that cannot be exported
        return _one_line(error)
    written = torch.randint(256, (_PROBE_BYTES,), dtype=torch.uint8)
    memory.bytes.copy_(written)
    memory.flush()
    found = read(memory.address)
    memory.close()
    wrong = [f for f in found if f != written.numpy().tobytes()]
    reasons = [f for f in wrong if isinstance(f, str)]
    return reasons[0] if reasons else "the engine read something else" if wrong else ""


def _one_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _describe() -> dict[str, Any]:
    return {"names": [], "dtypes": [], "shapes": [], "offsets": []}
