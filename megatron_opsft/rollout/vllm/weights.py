"""The weights of a vLLM model: where it keeps them, its live parameters by name, also where a CPU
keeps them packed, and whether a draft model's are those that it was started with.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_opsft.rollout.engine import EngineLayout
from megatron_opsft.weights.checksum import checksum
from megatron_opsft.weights.rectangles import Parameter, Rect, hf_columns
from megatron_opsft.weights.rules import EMBEDDING, TIED_HEAD, WeightTable
from megatron_opsft.weights.vllm_layout import tied_head, vllm_parameters

_READ_ROWS = 256  # of the identity with which a packed weight is read


def vllm_layout(table: WeightTable, tp_size: int, *, packed_head: bool) -> EngineLayout:
    """vLLM's layout of a model. packed_head: the head's product has a copy of a tied embedding.

    Errors: `UserError` when tp_size does not divide the model.
    """

    @cache  # every push asks
    def parameters_of(tp_rank: int) -> tuple[Parameter, ...]:
        parameters = vllm_parameters(table, tp_rank, tp_size)
        if packed_head and table.shape.tied_embeddings:
            parameters = (*parameters, tied_head(parameters))
        return parameters

    names = [parameter.name for parameter in parameters_of(0)]
    return EngineLayout(
        tp_size=tp_size,
        parameters_of=parameters_of,
        hf_columns=hf_columns(table.hf_shapes()),
        uncertain=frozenset(name for name in names if ".experts." in name),
    )


def with_tied_head(
    tensors: Iterable[tuple[str, Tensor]], hf_names: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """The stream as vLLM needs it: a tied embedding comes under the head's name as well. hf_names:
    of all tensors.
    """
    embedding = EMBEDDING.hf_tensors[0][0]
    for name, tensor in tensors:
        yield name, tensor
        if name == embedding and TIED_HEAD not in hf_names:
            yield TIED_HEAD, tensor


class EngineTensors(Mapping[str, Tensor]):
    """The parameters of vLLM's model by name; a packed one is unpacked into a copy when read.

    On a CPU vLLM keeps linear weights in a form that only its matrix product can read. Applied to
    the identity, that product gives the weight back, exactly but for the sign of zeros.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._names = [name for name, _ in model.named_parameters()]
        self._packing: dict[str, Any] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            # A lookup in the embedding reads the live weight; only the head multiplies with it.
            multiplies = hasattr(module, "cpu_linear") and "embed_tokens" not in name
            if multiplies and _is_packed(module):
                self._packing[f"{name}.weight"] = module
        self._last: tuple[str, Tensor] | None = None

    @property
    def packs(self) -> bool:
        """Whether any weight is packed."""
        return bool(self._packing)

    @property
    def packs_head(self) -> bool:
        """Whether the head's product has a packed copy of its weight."""
        return TIED_HEAD in self._packing

    def packed(self, expected: Sequence[Parameter]) -> str:
        """Why these parameters cannot be written in place; "" where they can."""
        for parameter in expected:
            if parameter.name in self._packing:
                return f"vLLM holds {parameter.name} packed"
            if parameter.name not in self._names:
                return f"vLLM has no parameter {parameter.name}"
            shape = tuple(self[parameter.name].shape)
            if shape != parameter.shape:
                return f"vLLM's {parameter.name} has shape {list(shape)}, not the expected one"
        return ""

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._packing:
            return self._model.get_parameter(name).data
        if self._last is None or self._last[0] != name:
            self._last = (name, _unpack(self._packing[name]))
        return self._last[1]

    def forget(self) -> None:
        """Drop the copy that was read last: the weights have changed."""
        self._last = None

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._names, *self._packing]))

    def __len__(self) -> int:
        return len({*self._names, *self._packing})


def _is_packed(module: torch.nn.Module) -> bool:
    """Whether the product ignores the weight it is given."""
    weight: Any = module.weight
    if weight.numel() == 0:
        return True
    ones = torch.ones(1, weight.shape[1], dtype=weight.dtype)
    product: Any = module.cpu_linear
    return bool(product(ones, torch.zeros_like(weight), None).any())


@torch.inference_mode()
def _unpack(module: Any) -> Tensor:
    """The weight [rows, columns] that the module's product multiplies with."""
    if module.weight.numel():
        columns = module.weight.shape[1]
    else:  # a layer that no rank cuts has only the whole size
        columns = getattr(module, "input_size_per_partition", module.input_size)
    parts = []
    for start in range(0, columns, _READ_ROWS):
        count = min(_READ_ROWS, columns - start)
        identity = torch.zeros(count, columns, dtype=module.weight.dtype)
        identity[torch.arange(count), torch.arange(start, start + count)] = 1
        parts.append(module.cpu_linear(identity, module.weight, None))
    return torch.cat(parts).T.contiguous()


class DraftWeights:
    """A draft model beside the policy, and the checksums of what is its own at the start.

    A push writes the policy's weights, and with them what a draft shares with the policy, such as
    the embedding. It must change nothing else of the draft, and a draft must not lose what it
    shares.
    """

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
