"""The group of trainer and engines elsewhere over NCCL, which wants a GPU for each member."""

import pytest
import torch
from spanning_rounds import EXPECTED, rounds_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_messages_over_nccl_are_those_over_gloo() -> None:
    assert rounds_of(("cuda:0", "cuda:1")) == EXPECTED
