"""Checksums that show, after a push, that the engine holds the trainer's weights; no process group.

The checksum of an engine parameter is the sum modulo 2^64 of the checksums of its rectangles of HF
tensors, and that of a rectangle the sum over its elements. So the trainer's ranks can compute the
expected value of every engine parameter from whatever pieces of it they hold, each its own piece,
and one sum over all ranks completes it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_opsft.weights.checksum import checksum, unit_bytes
from megatron_opsft.weights.rectangles import Copy, Parameter


def parameter_checksums(
    parameters: Sequence[Parameter],
    tensors: Mapping[str, Tensor],
    *,
    hf_columns: Mapping[str, int],
    cuts: int,
    signed_zeros: bool = True,
) -> list[int]:
    """The checksum of each parameter as its holder sees it, int64 values.

    A parameter that has another shape than described counts as 0, and so does one that is padding
    alone: the last ranks of a small vocabulary may hold no token of it.

    hf_columns: HF name -> columns of the whole tensor; cuts: into how many equal parts the trainer
    and the engine together cut columns (the least common multiple of both tensor-parallel sizes).
    """
    sums = []
    for parameter in parameters:
        tensor = tensors[parameter.name]
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        is_described = tuple(tensor.shape) == parameter.shape
        for number, part in enumerate(parameter.parts if is_described else ()):
            total += _checksum(part, tensor, number, hf_columns, cuts, signed_zeros)
        sums.append(total)
    return torch.stack(sums).tolist() if sums else []


def expected_checksums(
    parameters: Sequence[Parameter],
    held: Mapping[str, Sequence[Copy]],
    tensors: Mapping[str, Tensor],
    *,
    hf_columns: Mapping[str, int],
    cuts: int,
    signed_zeros: bool = True,
) -> Tensor:
    """This trainer rank's contribution to the checksum of each engine parameter, int64 [P] on CPU.

    held: HF name -> the parts that this rank answers for, of the parameters `tensors`. Over all
    ranks they must cover every HF tensor once.
    """
    found: list[Tensor] = []
    owners: list[int] = []
    for position, parameter in enumerate(parameters):
        for number, wanted in enumerate(parameter.parts):
            for part in held.get(wanted.source.tensor, ()):
                cut = part.cut(wanted.source)
                if cut is not None:
                    tensor = tensors[cut.target.tensor]
                    found.append(_checksum(cut, tensor, number, hf_columns, cuts, signed_zeros))
                    owners.append(position)
    sums = torch.zeros(len(parameters), dtype=torch.int64)
    if found:
        sums.index_add_(0, torch.tensor(owners), torch.stack(found).cpu())
    return sums


def _checksum(
    part: Copy,
    tensor: Tensor,
    number: int,
    hf_columns: Mapping[str, int],
    cuts: int,
    signed_zeros: bool,
) -> Tensor:
    """Checksum of the part of an HF tensor in `tensor`; number: of the engine's part around it."""
    unit = unit_bytes(hf_columns[part.source.tensor], tensor.itemsize, cuts)
    view = part.target.view(tensor)
    return checksum(view, part.source, salt=number, unit_bytes=unit, signed_zeros=signed_zeros)
