"""Weights into memory that another process of this machine can map, in buckets."""

import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGN = 64


@dataclass
class _Bucket:
    """A file without a name, mapped here; others open it through this process's descriptor."""

    descriptor: int
    memory: Tensor

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"


class SharedBuckets:
    """Two buckets, filled in turn: one is read by the other process while the next is filled."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Any]]:
        """Descriptions of filled buckets, the fields of `vllm_worker.BucketInfo`.

        A bucket must have been read when the next but one is asked for. A tensor larger than a
        bucket gets one of its own size.
        """
        number = used = 0
        info = _describe()
        for name, tensor in tensors:
            size = tensor.numel() * tensor.itemsize
            start = -(-used // _ALIGN) * _ALIGN
            if info["names"] and start + size > self._bucket_bytes:
                yield self._finish(number, info, used)
                number, start, info = number + 1, 0, _describe()
            memory = self._memory(number % 2, start + size)
            target = memory[start : start + size].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor)
            info["names"].append(name)
            info["dtypes"].append(str(tensor.dtype).removeprefix("torch."))
            info["shapes"].append(list(tensor.shape))
            info["offsets"].append(start)
            used = start + size
        if info["names"]:
            yield self._finish(number, info, used)

    def _finish(self, number: int, info: dict[str, Any], used: int) -> dict[str, Any]:
        return {**info, "path": self._buckets[number % 2].path, "num_bytes": used}

    def _memory(self, which: int, num_bytes: int) -> Tensor:
        while len(self._buckets) <= which:
            self._buckets.append(_new_bucket(self._bucket_bytes))
        if self._buckets[which].memory.numel() < num_bytes:  # only ever while it is still empty
            os.close(self._buckets[which].descriptor)
            self._buckets[which] = _new_bucket(num_bytes)
        return self._buckets[which].memory

    def close(self) -> None:
        """Give the memory back."""
        for bucket in self._buckets:
            os.close(bucket.descriptor)
        self._buckets.clear()


def _describe() -> dict[str, Any]:
    return {"names": [], "dtypes": [], "shapes": [], "offsets": []}


def _new_bucket(num_bytes: int) -> _Bucket:
    descriptor = os.memfd_create("opsft-weights")
    os.ftruncate(descriptor, num_bytes)
    mapping = mmap.mmap(descriptor, num_bytes)
    return _Bucket(descriptor, torch.frombuffer(mapping, dtype=torch.uint8))
