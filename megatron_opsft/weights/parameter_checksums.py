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
from megatron_opsft.weights.layouts import Parameter, Part, view


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
        if tuple(tensor.shape) != parameter.shape:
            sums.append(torch.zeros((), dtype=torch.int64, device=tensor.device))
            continue
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for number, part in enumerate(parameter.parts):
            total += checksum(
                view(tensor, part, part.rect),
                part.rect,
                salt=number,
                unit_bytes=unit_bytes(hf_columns[part.hf_name], tensor.itemsize, cuts),
                signed_zeros=signed_zeros,
            )
        sums.append(total)
    return torch.stack(sums).tolist() if sums else []


def expected_checksums(
    parameters: Sequence[Parameter],
    pieces: Mapping[str, Sequence[tuple[Part, Tensor]]],
    *,
    hf_columns: Mapping[str, int],
    cuts: int,
    signed_zeros: bool = True,
) -> Tensor:
    """This trainer rank's contribution to the checksum of each engine parameter, int64 [P] on CPU.

    pieces: HF name -> the rectangles that this rank answers for, each with the tensor that holds
    it. Over all ranks they must cover every HF tensor once.
    """
    total: list[Tensor] = []
    owners: list[int] = []
    for position, parameter in enumerate(parameters):
        for number, wanted in enumerate(parameter.parts):
            for part, tensor in pieces.get(wanted.hf_name, ()):
                rect = part.rect.intersect(wanted.rect)
                if rect is None:
                    continue
                unit = unit_bytes(hf_columns[wanted.hf_name], tensor.itemsize, cuts)
                total.append(
                    checksum(
                        view(tensor, part, rect),
                        rect,
                        salt=number,
                        unit_bytes=unit,
                        signed_zeros=signed_zeros,
                    )
                )
                owners.append(position)
    sums = torch.zeros(len(parameters), dtype=torch.int64)
    if total:
        sums.index_add_(0, torch.tensor(owners), torch.stack(total).cpu())
    return sums
