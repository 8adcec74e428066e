"""Memory that other processes of this machine can read: the host's, or a GPU's over CUDA IPC."""

import mmap
import os
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing import reductions

_DEVICE_INDEX = 6  # among the arguments of `reductions.rebuild_cuda_tensor`


@dataclass(frozen=True, slots=True)
class HostAddress:
    """path: of a file that any process of this user can map while its owner lives."""

    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CudaAddress:
    """handle: the arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`."""

    handle: tuple[Any, ...]
    num_bytes: int


Address = HostAddress | CudaAddress


class SharedMemory(Protocol):
    """bytes: uint8 [num_bytes], this process's view. address: how others `open_shared` it."""

    bytes: Tensor
    address: Address

    def flush(self) -> None:
        """Return when others would read what was written."""

    def close(self) -> None:
        """Give the memory back."""


class HostMemory:
    """A file without a name, mapped here; others open it through this process's descriptor."""

    def __init__(self, num_bytes: int) -> None:
        self._descriptor = os.memfd_create("opsft-shared")
        os.ftruncate(self._descriptor, num_bytes)
        mapping = mmap.mmap(self._descriptor, num_bytes)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self.address: Address = HostAddress(f"/proc/{os.getpid()}/fd/{self._descriptor}", num_bytes)

    def flush(self) -> None:
        """Nothing: copies into host memory have waited."""

    def close(self) -> None:
        """Give it back once its readers have, too."""
        os.close(self._descriptor)


class CudaMemory:
    """Memory of one GPU, which processes on the machine's other GPUs can open as well."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        _, handle = reductions.reduce_tensor(self.bytes)
        self.address: Address = CudaAddress(handle, num_bytes)

    def flush(self) -> None:
        """Wait for the copies that were queued."""
        torch.cuda.synchronize(self.bytes.device)

    def close(self) -> None:
        """Drop this process's hold on it."""
        del self.bytes


def open_shared(address: Address, device: torch.device) -> Tensor:
    """Another process's memory, uint8 [num_bytes]. device: of the reader, which need not be the
    memory's.

    Errors: RuntimeError or OSError where this process cannot reach it.
    """
    if isinstance(address, HostAddress):
        return torch.from_file(address.path, shared=True, size=address.num_bytes, dtype=torch.uint8)
    arguments = list(address.handle)
    arguments[_DEVICE_INDEX] = device.index or 0
    return reductions.rebuild_cuda_tensor(*arguments)
