"""The SplitMix64 generator on tensors of int64, whose arithmetic wraps around: the same bits on
every device.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
"""

from torch import Tensor

# Multipliers and shifts of the SplitMix64 generator, as signed 64-bit integers.
STEP64 = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def mix64(states: Tensor) -> Tensor:
    """Return the outputs of SplitMix64 in these states, int64, elementwise; integers wrap."""
    for shift, factor in _MIX:
        states = (states ^ shift_right(states, shift)) * factor
    return states ^ shift_right(states, 31)


def shift_right(values: Tensor, num_bits: int) -> Tensor:
    """Shift int64 values right and fill with zeros; torch's own shift copies the sign bit."""
    return (values >> num_bits) & (2 ** (64 - num_bits) - 1)
