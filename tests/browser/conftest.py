"""The one browser, and the one page, that all tests of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium, missing_programs
from made_runs import make_evaluation, make_run, write_report


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    missing = missing_programs()
    assert not missing, f"{missing} are not installed: sudo bash tools/install_chromium.sh"
    running = Chromium(tmp_path_factory.mktemp("profile"))
    yield running
    running.driver.quit()


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of them crashed, and two evaluations."""
    at = tmp_path_factory.mktemp("page")
    runs = [make_run(at / "first"), make_run(at / "crashed", lr=2e-4, steps=2, finished=False)]
    evaluations = [
        make_evaluation(at / f"eval{n}", f"model {n}", 300 - 200 * n, 6 + n) for n in (0, 1)
    ]
    write_report(at / "report.html", evaluations, runs)
    return at / "report.html"
