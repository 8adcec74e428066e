"""The one world of worker processes that all gloo tests share."""

from collections.abc import Iterator

import pytest
from world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    shared = World()
    yield shared
    shared.stop()
