"""Deltas between two messages: exact on bits, and only where they are shorter."""

import pytest
import torch
from torch import Tensor

from megatron_opsft.transfer.delta import apply, as_bits, delta_bytes, encode

DTYPES = [torch.bfloat16, torch.float32]


def message(dtype: torch.dtype, size: int = 1000) -> Tensor:
    """With infinities, NaNs of two kinds, and zeros of both signs."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[:6] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0]).to(dtype)
    as_bits(values)[6] = as_bits(values)[2] ^ 1  # another NaN
    return values


def places(values: Tensor) -> list[Tensor]:
    """A vector, columns of a wider matrix, and a matrix: one behind the other they are `values`."""
    vector, wide, matrix = torch.empty(100), torch.full((30, 20), 7.0), torch.empty(60, 10)
    found = [vector.to(values.dtype), wide.to(values.dtype)[:, 5:15], matrix.to(values.dtype)]
    for place, part in zip(found, values.split([100, 300, 600]), strict=True):
        place.copy_(part.view(place.shape))
    return found


def read(found: list[Tensor]) -> Tensor:
    return torch.cat([place.flatten() for place in found])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_changed_comes_over_bit_for_bit(dtype: torch.dtype) -> None:
    before = message(dtype)
    now = before.clone()
    now[torch.arange(0, 1000, 97)] *= -1
    now[3], now[4] = before[4], before[3]  # zeros change their sign
    as_bits(now)[2], as_bits(now)[6] = as_bits(before)[6], as_bits(before)[2]  # NaNs change bits
    changed, delta = encode(places(now), places(before))
    assert changed == int((as_bits(now) != as_bits(before)).sum()) == 15
    assert delta is not None and len(delta) == delta_bytes(changed, dtype.itemsize)
    written = places(before)
    apply(delta, written)
    assert torch.equal(as_bits(read(written)), as_bits(now))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_changed_is_nothing_sent(dtype: torch.dtype) -> None:
    before = message(dtype)
    changed, delta = encode(places(before), places(before))
    assert changed == 0 and delta is not None and len(delta) == 0
    written = places(before)
    apply(delta, written)
    assert torch.equal(as_bits(read(written)), as_bits(before))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_delta_that_is_not_shorter_is_none(dtype: torch.dtype) -> None:
    before = message(dtype)
    assert encode([before + 1], [before])[1] is None
    most = (1000 * dtype.itemsize - 1) // delta_bytes(1, dtype.itemsize)
    for number, shorter in ((most, True), (most + 1, False)):
        now = before.clone()
        as_bits(now)[:number] ^= 1
        changed, delta = encode(places(now), places(before))
        assert changed == number
        assert (delta is not None) == shorter
