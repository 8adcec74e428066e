"""The one browser that all tests of this folder share."""

from collections.abc import Iterator

import pytest
from chromium import Chromium


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    running = Chromium(tmp_path_factory.mktemp("profile"))
    yield running
    running.driver.quit()
