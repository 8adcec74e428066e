"""The parameters of a vLLM model by name, also where a CPU keeps them packed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_opsft.weights.rectangles import Parameter
from megatron_opsft.weights.rules import TIED_HEAD

_READ_ROWS = 256  # of the identity with which a packed weight is read


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
