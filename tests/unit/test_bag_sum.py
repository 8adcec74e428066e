"""Sums that say whether two sets of tensors hold the same values, wherever they are."""

import pytest
import torch

from megatron_opsft.weights.bag_sum import bag_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_places_cuts_and_zeros_do_not_matter_and_values_do(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(40, 30, generator=generator) * 100).to(dtype)
    whole = bag_sum(values)
    assert bag_sum(values.T.flip(0)) == whole
    assert (bag_sum(values[:7]) + bag_sum(values[7:])) % 2**64 == whole
    assert bag_sum(torch.cat([values, values.new_zeros(5, 30), -values.new_zeros(2, 30)])) == whole
    other = values.clone()
    other[3, 4] += 1
    assert bag_sum(other) != whole
    assert bag_sum(torch.cat([values, values[:1]])) != whole
    assert bag_sum(values.new_zeros(9)) == 0


def test_pairs_of_changes_do_not_cancel() -> None:
    """Of bits that are next to each other, and of signs."""
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    swapped = torch.tensor([-1.0, -2.0, 3.0, 4.0])
    assert bag_sum(values) != bag_sum(swapped)
    bits = values.view(torch.int32)
    moved = (bits + torch.tensor([1, -1, 0, 0], dtype=torch.int32)).view(torch.float32)
    assert bag_sum(values) != bag_sum(moved)
