"""A GPU, and no process group that the test before has left."""

from collections.abc import Iterator

import pytest
import torch

from megatron_opsft.runtime.distributed import stop_distributed


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module that also runs on a CPU has `ON_CPU`: whether it shall."""
    if not torch.cuda.is_available() and not getattr(request.module, "ON_CPU", False):
        pytest.skip("needs a CUDA device")
    yield
    stop_distributed()
