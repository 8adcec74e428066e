"""Pinned host memory, which a GPU's copies read and write by themselves, in one block for many
tensors.

torch's own pinned memory is a block for each tensor, rounded up to a power of two and kept for
good: up to twice what the tensors take.
"""

import logging
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

log = logging.getLogger("megatron_opsft")

ALIGNMENT = 64  # bytes: where a tensor of a block may begin


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of a block that holds copies of them."""
    return sum(map(_aligned_bytes, tensors))


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


class PinnedBlock:
    """A block of pinned host memory of the given size, on pages of its own. It is unpinned when
    this object goes; the copies in it stay valid for as long as they are used.

    Where the driver refuses to pin them, a warning says so, and copies are right and slower.
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
        """Copies of a GPU's tensors, from the beginning of the block; all are there on return."""
        copies, offset = [], 0
        for tensor in tensors:
            place = self._part(offset, tensor.dtype, tensor.numel())
            copies.append(place.view(tensor.shape).copy_(tensor, non_blocking=True))
            offset += _aligned_bytes(tensor)
        torch.cuda.synchronize()
        return copies

    def _part(self, offset: int, dtype: torch.dtype, count: int) -> Tensor:
        """`count` numbers of the block from byte `offset` on, as a tensor with a storage of its
        own: torch.save and torch.distributed.checkpoint write a tensor's whole storage.
        """
        if count == 0:  # which torch.frombuffer refuses
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._pages, dtype=dtype, count=count, offset=offset)


def _pin(memory: Tensor) -> bool:
    """Whether the driver has pinned it; a warning where it has not."""
    result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(result) == 0:
        return True
    log.warning(
        "the driver does not pin %.3f GB of host memory (cudaHostRegister: error %d): copies from "
        "the GPU, of checkpoints and of a reference model, take longer",
        memory.nbytes / 1e9,
        int(result),
    )
    # CUDA reports this error once more at the next launch of a kernel: launch one here, so that the
    # run's own does not fail.
    with suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0)
    return False


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class HostCopies:
    """Copies of a rank's tensors in host memory, of one set of tensors at a time.

    Those of a GPU are in a pinned block, which is made when it is first needed and kept, since
    pinning takes long; a larger set gets a new one.
    """

    def __init__(self) -> None:
        self._block: PinnedBlock | None = None
        self._is_in_use = False

    def take(self, tensors: Sequence[Tensor], *, copy: bool) -> list[Tensor]:
        """The tensors in host memory; all are there on return, and stay until `release`.

        copy: of those that are in host memory already, too. Errors: `RuntimeError` where the copies
        that were taken before are not released.
        """
        if self._is_in_use:
            raise RuntimeError("host memory is filled again while it is still read")
        on_gpu = iter(
            self._pinned_copies([tensor for tensor in tensors if tensor.is_cuda])
        )
        copies = [
            next(on_gpu) if tensor.is_cuda else tensor.to("cpu", copy=copy)
            for tensor in tensors
        ]
        self._is_in_use = True
        return copies

    def _pinned_copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if not tensors:
            return []
        num_bytes = packed_bytes(tensors)
        if self._block is None or self._block.num_bytes < num_bytes:
            self._block = None  # its memory goes before the new one's comes
            self._block = PinnedBlock(num_bytes)
        return self._block.copies_of(tensors)

    def release(self) -> None:
        """Let the copies go: the next ones are written over them."""
        self._is_in_use = False
