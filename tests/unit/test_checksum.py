"""The checksum's additivity, what it notices, and what it does not depend on."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from tiny_models import SHAPES
from torch import Tensor

from megatron_opsft.models.weights import checksum as module
from megatron_opsft.models.weights.checksum import checksum, expected_checksums, parameter_checksums
from megatron_opsft.models.weights.rectangles import Rect
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.rollout.vllm.weights import vllm_layout


def values(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def of(tensor: Tensor, rect: Rect | None = None) -> int:
    """Of a rectangle of a whole HF tensor."""
    rect = rect or Rect("x", 0, tensor.shape[0], 0, tensor.shape[1])
    part = tensor[rect.row0 : rect.row1, rect.col0 : rect.col1]
    return int(checksum(part, rect, salt=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("columns", "cuts"), [(48, 3), (7, 1)])
def test_pieces_add_up_to_the_whole(dtype: torch.dtype, columns: int, cuts: int) -> None:
    tensor, width = values(23, columns, dtype), columns // cuts
    by_columns = [Rect("x", 0, 23, n * width, (n + 1) * width) for n in range(cuts)]
    by_rows = [Rect("x", a, b, 0, columns) for a, b in ((0, 1), (1, 17), (17, 23))]
    both = [Rect("x", r.row0, r.row1, c.col0, c.col1) for r in by_rows for c in by_columns]
    for pieces in (by_columns, by_rows, both):
        assert (sum(of(tensor, rect) for rect in pieces) - of(tensor)) % 2**64 == 0
    assert (sum(of(tensor, rect) for rect in both[1:]) - of(tensor)) % 2**64 != 0


def test_every_single_bit_is_noticed() -> None:
    tensor = values(3, 8)
    bits = tensor.view(torch.int16)
    seen = {of(tensor)}
    for row, column, bit in product(range(3), range(8), range(16)):
        before = int(bits[row, column])
        bits[row, column] ^= -(2**15) if bit == 15 else 2**bit
        seen.add(of(tensor))
        bits[row, column] = before
    assert len(seen) == 1 + 3 * 8 * 16


def test_changes_of_many_elements_are_noticed() -> None:
    tensor = values(12, 16)

    def changed(where: Any, factor: float) -> Tensor:
        other = tensor.clone()
        other[where] *= factor
        return other

    columns = [(slice(None), column) for column in range(16)]
    found = [tensor, tensor.flip(0), tensor.flip(1)]
    found += [tensor[[row, *range(1, row), 0, *range(row + 1, 12)]] for row in range(1, 12)]
    found += [changed(where, f) for where in (..., *columns) for f in (-1, 0, 0.5, 2, 4)]
    found += [changed((slice(3, 5), column), -1) for column in range(16)]  # two signs
    found += [changed(row, 0) + changed(row, 0).eq(0) for row in range(12)]  # stale rows
    assert len({of(each) for each in found}) == len(found)


def test_views_and_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = values(50, 24)
    shifted = torch.zeros(50, 27, dtype=torch.bfloat16)  # rows do not start at whole words
    spread = torch.zeros(100, 24, dtype=torch.bfloat16)
    shifted[:, 1:25] = spread[::2] = tensor
    expected = of(tensor)
    for chunk_bytes in (8, 400, 2**20):
        monkeypatch.setattr(module, "_CHUNK_BYTES", chunk_bytes)
        for view in (tensor, shifted[:, 1:25], spread[::2], tensor.T.contiguous().T):
            assert of(view) == expected


def test_a_shard_of_the_vocabulary_that_is_all_padding_counts_as_zero() -> None:
    """65 tokens are padded to 128, 32 for each of 4 ranks: the last one holds none of them."""
    shape = replace(SHAPES["qwen2"], vocab_size=65)
    layout = vllm_layout(WeightTable(shape), 4)
    (last,) = (p for p in layout.parameters_of(3) if "embed_tokens" in p.name)
    assert last.copies == () and last.padding_row == 0
    found = parameter_checksums([last], {last.name: torch.zeros(last.shape)})
    assert found == expected_checksums([last], {}, {}).tolist() == [0]
    assert parameter_checksums([], {}) == []
