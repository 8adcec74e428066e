"""The tensors of a model directory, compared bit for bit."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def all_tensors(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype is value.dtype, name
        bits, expected_bits = (
            x.detach().reshape(-1).view(torch.uint8) for x in (found[name], value)
        )
        assert found[name].shape == value.shape and torch.equal(bits, expected_bits), name
