"""Whether the weights of vLLM's draft model are those that it was started with.

A push writes the policy's weights, and with them what a draft shares with the policy, such as the
embedding. It must change nothing else of the draft, and a draft must not lose what it shares.
"""

import torch
from torch import Tensor

from megatron_opsft.rollout.vllm.engine_tensors import EngineTensors
from megatron_opsft.weights.checksum import checksum
from megatron_opsft.weights.rectangles import Rect


class DraftWeights:
    """A draft model beside the policy, and the checksums of what is its own at the start."""

    def __init__(self, draft: torch.nn.Module, policy: torch.nn.Module) -> None:
        self._draft, self._policy = draft, policy
        self._tensors = EngineTensors(draft)
        self._at_start = self._checksums()

    def fault(self) -> str:
        """Which weight is not as it was at the start, and how; "" where all are."""
        self._tensors.forget()
        now = self._checksums()
        if names := sorted(now.keys() ^ self._at_start.keys()):
            return f"it no longer shares {names[0]} with the policy, or shares it only now"
        changed = (name for name, value in now.items() if value != self._at_start[name])
        return next((f"{name} has changed" for name in changed), "")

    def _checksums(self) -> dict[str, int]:
        """Of the draft's parameters but for those in modules of the policy, and of its buffers."""
        policy = {id(module) for module in self._policy.modules()}
        shared = {name for name, m in self._draft.named_modules() if id(m) in policy}
        # The sign of a zero does not survive the unpacking of a weight.
        signed = not self._tensors.packs
        own = {
            name: _checksum(self._tensors[name], signed_zeros=signed)
            for name in self._tensors
            if name.rpartition(".")[0] not in shared
        }
        return own | {
            name: _checksum(buffer, signed_zeros=True)
            for name, buffer in self._draft.named_buffers()
        }


def _checksum(tensor: Tensor, *, signed_zeros: bool) -> int:
    if not tensor.numel():
        return 0
    view = tensor.reshape(len(tensor), -1) if tensor.dim() else tensor.reshape(1, 1)
    whole = Rect("", 0, view.shape[0], 0, view.shape[1])
    unit = view.itemsize
    return int(checksum(view, whole, salt=0, unit_bytes=unit, signed_zeros=signed_zeros))
