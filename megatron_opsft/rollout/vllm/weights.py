"""The weights of a vLLM model: where it keeps them, and whether a draft model's are those that it
was started with.
"""

from functools import cache, partial

import torch
from torch import Tensor

from megatron_opsft.models.weights.checksum import checksum
from megatron_opsft.models.weights.rectangles import Rect
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.models.weights.vllm_layout import vllm_parameters
from megatron_opsft.rollout.engine import EngineLayout


def vllm_layout(table: WeightTable, tp_size: int, tp_rank: int = 0) -> EngineLayout:
    """vLLM's layout of a model. Errors: `UserError` when tp_size does not divide the model."""
    return EngineLayout(
        tp_size=tp_size,
        tp_rank=tp_rank,
        parameters_of=cache(
            partial(vllm_parameters, table, tp_size=tp_size)
        ),  # every push asks
    )


class DraftWeights:
    """A draft model beside the policy, and the checksums of what is its own at the start.

    A push writes the policy's weights, and with them what a draft shares with the policy, such as
    the embedding. It must change nothing else of the draft, and a draft must not lose what it
    shares.
    """

    def __init__(self, draft: torch.nn.Module, policy: torch.nn.Module) -> None:
        self._draft, self._policy = draft, policy
        self._at_start = self._checksums()

    def fault(self) -> str:
        """Which weight is not as it was at the start, and how; "" where all are."""
        now = self._checksums()
        if names := sorted(now.keys() ^ self._at_start.keys()):
            return (
                f"it no longer shares {names[0]} with the policy, or shares it only now"
            )
        changed = (name for name, value in now.items() if value != self._at_start[name])
        return next((f"{name} has changed" for name in changed), "")

    def _checksums(self) -> dict[str, int]:
        """Of the draft's parameters but for those in modules of the policy, and of its buffers."""
        policy = {id(module) for module in self._policy.modules()}
        shared = {name for name, m in self._draft.named_modules() if id(m) in policy}
        own = {
            name: _checksum(parameter)
            for name, parameter in self._draft.named_parameters()
            if name.rpartition(".")[0] not in shared
        }
        return own | {
            name: _checksum(buffer) for name, buffer in self._draft.named_buffers()
        }


def _checksum(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    view = tensor.reshape(len(tensor), -1) if tensor.dim() else tensor.reshape(1, 1)
    return int(checksum(view, Rect("", 0, view.shape[0], 0, view.shape[1]), salt=0))
