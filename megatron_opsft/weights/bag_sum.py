"""A checksum of a tensor's values that does not depend on their places.

So tensors can be compared that were fused, cut up or padded with zeros in between.
"""

import torch
from torch import Tensor

_CHUNK = 2**21  # elements
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Multipliers and shifts of the splitmix64 generator's last part, as signed 64-bit integers.
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


@torch.no_grad()
def bag_sum(tensor: Tensor) -> int:
    """The sum modulo 2^64 of a number made of each element's bits; zeros, of either sign, count
    nothing. Sums of several tensors add up. Bits count, so compare tensors of the same dtype.
    """
    total = 0
    for chunk in tensor.detach().reshape(-1).split(_CHUNK):
        values = chunk.view(_BITS[chunk.itemsize]).to(torch.int64)
        values = values.masked_fill(chunk == 0, 0)
        for shift, factor in _MIX:
            values = (values ^ _shift(values, shift)) * factor
        total += int((values ^ _shift(values, 31)).sum())
    return total % 2**64


def _shift(values: Tensor, by: int) -> Tensor:
    """To the right, and zeros come in from the left."""
    return (values >> by) & (2 ** (64 - by) - 1)
