"""Settings of every test, no network and one thread per process, and the command line to call."""

import os
from collections.abc import Iterator

import pytest
from forked_cli import ForkedCli

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCli]:
    """Runs the command line, each time in a process of its own."""
    with ForkedCli(tmp_path_factory.mktemp("cli")) as server:
        yield server
