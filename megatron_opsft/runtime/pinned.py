"""Pinned host memory, which a GPU reads and writes directly, in one block for many tensors.

torch's own pinned memory has a block for each tensor, rounded up to a power of two and never freed:
up to twice the size of the tensors.
"""

import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from megatron_opsft.errors import log
from megatron_opsft.runtime.rounding import round_up

ALIGNMENT = 64
"""Bytes: each tensor of a block begins at a multiple of it."""


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of a block that holds copies of the tensors."""
    return sum(round_up(tensor.nbytes, ALIGNMENT) for tensor in tensors)


class PinnedBlock:
    """A block of pinned host memory of the given size, on pages of its own.

    It is unpinned when this object is garbage-collected; tensors in it stay valid as long as they
    are used. If the driver refuses to pin it, a warning is logged, and copies are slower.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = max(num_bytes, ALIGNMENT)  # mmap refuses a length of 0
        self._pages = mmap.mmap(
            -1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        # A child process that is forked would get a copy of every pinned page at once.
        self._pages.madvise(mmap.MADV_DONTFORK)
        whole = torch.frombuffer(self._pages, dtype=torch.uint8)
        if _pin(whole):
            # `whole` keeps the pages mapped until they are unpinned. At the end of the process the
            # driver unpins them by itself.
            weakref.finalize(self, _unpin, whole).atexit = False

    def copies_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy a GPU's tensors to the beginning of the block; all copies are complete on return."""
        copies = self.begin_copies_of(tensors)
        torch.cuda.synchronize()
        return copies

    def begin_copies_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Begin to copy a GPU's tensors to the beginning of the block, on the current stream."""
        copies = []
        offset = 0
        for tensor in tensors:
            vector = self._vector(offset, tensor.dtype, tensor.numel())
            copies.append(vector.view(tensor.shape).copy_(tensor, non_blocking=True))
            offset += round_up(tensor.nbytes, ALIGNMENT)
        return copies

    def _vector(self, offset: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return `count` numbers of the block, from byte `offset` on, as a tensor with a storage of
        its own: torch.save and torch.distributed.checkpoint write a tensor's whole storage.
        """
        if count == 0:  # which torch.frombuffer refuses
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._pages, dtype=dtype, count=count, offset=offset)


def _pin(memory: Tensor) -> bool:
    """Pin the memory; return False, after a warning, if the driver refuses."""
    result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(result) == 0:
        return True
    log.warning(
        "the driver does not pin %.3f GB of host memory (cudaHostRegister: error %d): copies from "
        "the GPU, of checkpoints, a reference model or train.offload, take longer",
        memory.nbytes / 1e9,
        int(result),
    )
    # CUDA reports this error once more at the next launch of a kernel. Launch one here, so that no
    # kernel of the run fails.
    with suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0)
    return False


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class HostCopies:
    """Copies of a rank's tensors in host memory, for one set of tensors at a time.

    Copies of a GPU's tensors are in a pinned block. It is made when first needed and then kept,
    since pinning takes long; a larger set gets a new block.
    """

    def __init__(self) -> None:
        self._block: PinnedBlock | None = None
        self._is_in_use = False

    def take(self, tensors: Sequence[Tensor], *, copy: bool) -> list[Tensor]:
        """Return the tensors in host memory, complete on return and valid until `release`.

        copy: copy tensors that are in host memory already, too. Errors: `RuntimeError` if the
        copies before were not released.
        """
        if self._is_in_use:
            raise RuntimeError("host memory is filled again while it is still read")
        gpu_tensors = [tensor for tensor in tensors if tensor.is_cuda]
        pinned_copies = iter(self._copy_pinned(gpu_tensors))
        copies = []
        for tensor in tensors:
            if tensor.is_cuda:
                copies.append(next(pinned_copies))
            else:
                copies.append(tensor.to("cpu", copy=copy))
        self._is_in_use = True
        return copies

    def _copy_pinned(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy a GPU's tensors to the pinned block; make a new block if they do not fit."""
        if not tensors:
            return []
        if self._block is None or self._block.num_bytes < packed_bytes(tensors):
            self._block = None  # free its memory before the new block takes more
            self._block = PinnedBlock(packed_bytes(tensors))
        return self._block.copies_of(tensors)

    def release(self) -> None:
        """Allow the next `take` to overwrite the copies."""
        self._is_in_use = False
