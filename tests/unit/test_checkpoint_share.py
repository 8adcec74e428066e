"""Ranges of a flattened matrix as rectangles of it."""

import random

import torch

from megatron_opsft.model.checkpoint_share import flat_rectangles


def test_a_flat_range_is_at_most_three_rectangles_that_cover_it() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        rows, width = draw.randint(1, 6), draw.randint(1, 6)
        low = draw.randint(0, rows * width)
        high = draw.randint(low, rows * width)
        cut = flat_rectangles(low, high, width)
        assert len(cut) <= 3
        assert [i for a, b in cut for i in range(a, b)] == list(range(low, high))
        matrix = torch.arange(rows * width).view(rows, width)
        for a, b in cut:
            height = max(1, (b - a) // width)
            row, column = divmod(a, width)
            found = matrix[row : row + height, column : column + (b - a) // height]
            assert found.flatten().tolist() == list(range(a, b))
