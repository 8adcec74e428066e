"""A counting allocator: bytes of the tensors that operations made and that are still alive."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """`with LiveMemory() as memory: ...`; then `memory.peak_bytes`: the most at one time inside."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._now = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {id_of(leaf) for leaf in tree_leaves((args, kwargs)) if is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if is_tensor(leaf) and id_of(leaf) not in before | self._sizes.keys():
                storage = leaf.untyped_storage()
                self._sizes[id_of(leaf)] = storage.nbytes()
                self._now += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self._now)
                weakref.finalize(storage, self._free, id_of(leaf))
        return result

    def _free(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def id_of(tensor: Any) -> int:
    """Of the memory behind it; views share it."""
    return tensor.untyped_storage()._cdata
