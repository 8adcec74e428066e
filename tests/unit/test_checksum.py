"""The checksum's additivity, what it notices, and what it does not depend on."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_models import SHAPES
from torch import Tensor

from megatron_opsft.rollout.vllm.weights import vllm_layout
from megatron_opsft.weights import checksum as module
from megatron_opsft.weights.checksum import (
    checksum,
    expected_checksums,
    parameter_checksums,
    unit_bytes,
)
from megatron_opsft.weights.rectangles import Rect
from megatron_opsft.weights.rules import WeightTable

DTYPES = [torch.bfloat16, torch.float32]


def values(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def of(tensor: Tensor, rect: Rect | None = None, unit: int = 8, signed_zeros: bool = True) -> int:
    """Of a rectangle of a whole HF tensor."""
    rect = rect or Rect("x", 0, tensor.shape[0], 0, tensor.shape[1])
    part = tensor[rect.row0 : rect.row1, rect.col0 : rect.col1]
    return int(checksum(part, rect, salt=0, unit_bytes=unit, signed_zeros=signed_zeros))


def wrapped(number: int) -> int:
    """A whole number as a signed one of 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "cuts"), [(48, 1), (48, 2), (48, 3), (24, 4), (30, 3), (7, 1)])
def test_pieces_add_up_to_the_whole(dtype: torch.dtype, columns: int, cuts: int) -> None:
    tensor = values(23, columns, dtype)
    unit = unit_bytes(columns, dtype.itemsize, cuts)
    whole = of(tensor, unit=unit)
    width = columns // cuts
    by_columns = [Rect("x", 0, 23, n * width, (n + 1) * width) for n in range(cuts)]
    by_rows = [Rect("x", a, b, 0, columns) for a, b in ((0, 1), (1, 17), (17, 23))]
    both = [Rect("x", r.row0, r.row1, c.col0, c.col1) for r in by_rows for c in by_columns]
    for pieces in (by_columns, by_rows, both):
        assert wrapped(sum(of(tensor, rect, unit) for rect in pieces)) == whole
    assert wrapped(sum(of(tensor, rect, unit) for rect in both[1:])) != whole


@pytest.mark.parametrize("unit", [2, 8])
def test_every_bit_and_every_place_is_noticed(unit: int) -> None:
    tensor = values(3, 8)
    bits = tensor.view(torch.int16)
    seen = {of(tensor, unit=unit)}
    for row in range(3):
        for column in range(8):
            for bit in range(16):
                mask = -(2**15) if bit == 15 else 2**bit
                bits[row, column] ^= mask
                seen.add(of(tensor, unit=unit))
                bits[row, column] ^= mask
    seen |= {of(each.contiguous(), unit=unit) for each in (tensor.flip(0), tensor.flip(1), -tensor)}
    assert len(seen) == 1 + 3 * 8 * 16 + 3


@pytest.mark.parametrize(("unit", "signed_zeros"), [(2, True), (8, True), (2, False), (8, False)])
def test_views_chunks_and_devices_do_not_matter(
    unit: int, signed_zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other devices have no product of integer matrices; their way is taken here on the CPU."""
    tensor = values(50, 24)
    found = partial(of, unit=unit, signed_zeros=signed_zeros)
    expected = found(tensor)
    shifted = torch.zeros(50, 27, dtype=torch.bfloat16)  # rows do not start at whole words
    shifted[:, 1:25] = tensor
    spread = torch.zeros(100, 24, dtype=torch.bfloat16)
    spread[::2] = tensor
    flat = torch.zeros(50 * 24 + 2, dtype=torch.bfloat16)
    flat[2:] = tensor.flatten()
    views = (shifted[:, 1:25], spread[::2], flat[2:].view(50, 24), tensor.T.contiguous().T)
    for chunk_bytes in (8, 400, 2**20):
        monkeypatch.setattr(module, "_CPU_CHUNK_BYTES", chunk_bytes)
        assert [found(view) for view in (tensor, *views)] == [expected] * 5
    monkeypatch.setattr(module, "_has_integer_product", lambda device: False)
    for chunk_bytes in (400, 2**24):
        monkeypatch.setattr(module, "_CHUNK_BYTES", chunk_bytes)
        assert found(tensor) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [12, 3])
def test_signs_of_zeros_count_only_if_asked_for(dtype: torch.dtype, columns: int) -> None:
    plus = values(6, columns, dtype)
    plus[1:3] = 0.0
    minus = plus.clone()
    minus[1:3] = -0.0
    unit = unit_bytes(columns, dtype.itemsize, 1)
    for signed_zeros in (True, False):
        sums = [of(t, unit=unit, signed_zeros=signed_zeros) for t in (plus, minus, -plus)]
        assert (sums[0] == sums[1]) is not signed_zeros
        assert sums[0] != sums[2]


def test_a_shard_of_the_vocabulary_that_is_all_padding_counts_as_zero() -> None:
    """65 tokens are padded to 128, 32 for each of 4 ranks: the last one holds none of them."""
    shape = replace(SHAPES["qwen2"], vocab_size=65)
    layout = vllm_layout(WeightTable(shape), 4, packed_head=False)
    (last,) = (p for p in layout.parameters_of(3) if "embed_tokens" in p.name)
    assert last.parts == () and last.padding_row == 0
    found = parameter_checksums(
        [last], {last.name: torch.zeros(last.shape)}, hf_columns=layout.hf_columns, cuts=4
    )
    expected = expected_checksums([last], {}, {}, hf_columns=layout.hf_columns, cuts=4)
    assert found == expected.tolist() == [0]
    assert parameter_checksums([], {}, hf_columns={}, cuts=4) == []
