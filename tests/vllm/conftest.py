"""Worker processes that have vLLM, apart from the others: vLLM changes the process it lives in."""

from collections.abc import Iterator

import pytest
from processes import skip_without_vllm
from world import World


@pytest.fixture(scope="session")
def vllm_world() -> Iterator[World]:
    skip_without_vllm()
    shared = World()
    yield shared
    shared.stop()
