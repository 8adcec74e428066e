"""The weights of a vLLM model: their layout, and a check that a draft model's do not change."""

from functools import cache, partial

import torch
from torch import Tensor

from megatron_opsft.models.weights.checksum import checksum
from megatron_opsft.models.weights.rectangles import whole
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.models.weights.vllm_layout import vllm_parameters
from megatron_opsft.rollout.engine import EngineLayout


def vllm_layout(table: WeightTable, tp_size: int, tp_rank: int = 0) -> EngineLayout:
    """Describe vLLM's layout of a model.

    Errors: `parameters_of` raises `UserError` if tp_size cannot cut the model.
    """
    return EngineLayout(
        tp_size=tp_size,
        tp_rank=tp_rank,
        # Cached, since every weight sync asks.
        parameters_of=cache(partial(vllm_parameters, table, tp_size=tp_size)),
    )


class DraftWeights:
    """A draft model beside the policy, and the checksums that its own weights had at the start.

    A weight sync writes the policy's weights, and so those that the draft shares with it, such as
    the embedding. It must change nothing else of the draft, and the draft must go on sharing them.
    """

    def __init__(self, draft: torch.nn.Module, policy: torch.nn.Module) -> None:
        self._draft, self._policy = draft, policy
        self._at_start = self._checksums()

    def fault(self) -> str:
        """Say which weight is not as it was at the start, and how; "" if all are."""
        now = self._checksums()
        differing = sorted(now.keys() ^ self._at_start.keys())
        if differing:
            return f"it no longer shares {differing[0]} with the policy, or shares it only now"
        for name, value in now.items():
            if value != self._at_start[name]:
                return f"{name} has changed"
        return ""

    def _checksums(self) -> dict[str, int]:
        """Compute the checksums of the draft's buffers, and of its parameters except for those in
        modules that it shares with the policy.
        """
        policy = {id(module) for module in self._policy.modules()}
        shared = {
            name for name, module in self._draft.named_modules() if id(module) in policy
        }
        own = dict(self._draft.named_buffers())
        for name, parameter in self._draft.named_parameters():
            if name.rpartition(".")[0] not in shared:
                own[name] = parameter
        return {name: _checksum(tensor) for name, tensor in own.items()}


def _checksum(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    num_rows = len(tensor) if tensor.dim() else 1
    view = tensor.reshape(num_rows, -1)
    return int(checksum(view, whole("", tuple(view.shape)), salt=0))
