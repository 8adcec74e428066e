"""Memory of tensors that is given up for a while: their bytes wait in host memory, or are lost.

Whole storages shrink to nothing and grow back, so every tensor stays what it is, a view of its
storage; only its values cannot be read meanwhile.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_opsft.runtime.pinned import PinnedBlock, packed_bytes

Whereabouts = Callable[[Tensor], Tensor]
"""Returns a whole tensor with its values, also if its own memory is parked."""


def in_place(tensor: Tensor) -> Tensor:
    """Return the tensor, whose memory is never parked."""
    return tensor


class ParkedMemory:
    """The storages of one set of tensors, on their device or parked.

    A GPU's bytes wait in one pinned block, which is made when first needed and then kept; those of
    a CPU in other memory of the CPU, which saves nothing and is the oracle of the GPU's way.
    """

    def __init__(self, *, keeps: bool) -> None:
        """keeps: copy the bytes; otherwise they are lost, and come back as arbitrary ones."""
        self._keeps = keeps
        self._block: PinnedBlock | None = None
        self._stream: torch.cuda.Stream | None = None
        # All bytes of each storage as a uint8 tensor, by the address of the storage's object; empty
        # while nothing leaves or is parked. Then their sizes, and their copies if they are kept.
        self._storages: dict[int, Tensor] = {}
        self._sizes: dict[int, int] = {}
        self._copies: dict[int, Tensor] = {}
        self._is_parked = False

    @property
    def num_bytes(self) -> int:
        """Bytes that the device has more at the moment; 0 unless parked."""
        return sum(self._sizes.values()) if self._is_parked else 0

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Begin to copy the storages of these tensors, on a stream of its own on a GPU.

        Nothing may write them until `wake`. Does nothing if it was called before.
        """
        if self._storages:
            return
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                whole.set_(storage, 0, (storage.nbytes(),), (1,))
                self._storages[storage._cdata] = whole
                self._sizes[storage._cdata] = whole.nbytes
        if self._keeps:
            copies = self._begin_copies(list(self._storages.values()))
            self._copies = dict(zip(self._storages, copies, strict=True))

    def _begin_copies(self, storages: list[Tensor]) -> list[Tensor]:
        if not any(whole.is_cuda for whole in storages):
            return [whole.clone() for whole in storages]
        num_bytes = packed_bytes(storages)
        if self._block is None or self._block.num_bytes < num_bytes:
            self._block = None  # free its memory before the new block takes more
            self._block = PinnedBlock(num_bytes)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return self._block.begin_copies_of(storages)

    def park(self, tensors: Sequence[Tensor]) -> None:
        """Wait for the copies, and give the memory up. The tensors are those of `begin`."""
        self.begin(tensors)
        if self._is_parked or not self._storages:
            return
        self._synchronize()  # with kernels, too, that still read what is given up
        for whole in self._storages.values():
            whole.untyped_storage().resize_(0)
        if self._on_gpu:
            # An engine maps memory that torch's allocator must not hold.
            torch.cuda.empty_cache()
        self._is_parked = True

    def wake(self) -> None:
        """Take the memory back, with its bytes; complete on return. Does nothing if not parked."""
        if self._is_parked:
            for address, whole in self._storages.items():
                whole.untyped_storage().resize_(self._sizes[address])
            for address, copy in self._copies.items():
                self._storages[address].copy_(copy, non_blocking=True)
        self._synchronize()
        self._storages, self._sizes, self._copies = {}, {}, {}
        self._is_parked = False

    @property
    def _on_gpu(self) -> bool:
        return any(whole.is_cuda for whole in self._storages.values())

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def stored(self, tensor: Tensor) -> Tensor | None:
        """Return a view, in its parked copy, of a tensor that is parked: to be read and written
        there. None if it is not parked here.
        """
        copy = self._copies.get(tensor.untyped_storage()._cdata)
        if copy is None or not self._is_parked:
            return None
        values = copy.view(tensor.dtype)
        return values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
