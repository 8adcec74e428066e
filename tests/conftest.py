"""Settings of every test, no network and one thread per process, and the command line to call."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor

import pytest
from forked_cli import ForkedCli
from world import IMPORTED_ONCE

_CACHE = tempfile.TemporaryDirectory(prefix="cache-of-tests-")  # as long as the tests run
os.environ["HF_HOME"] = _CACHE.name
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `slow` what has processes of its own, but for tests marked `quick`. Of two workers
    one has all of vLLM's tests, the other those of the browser and of the cluster.
    """
    for item in items:
        group = "vllm" if item.path.parent.name == "vllm" else "beside"
        item.add_marker(pytest.mark.xdist_group(group))
        has_processes = item.path.parent.name == "gloo" or not {"cli", "elsewhere"}.isdisjoint(
            getattr(item, "fixturenames", ())
        )
        if has_processes and item.get_closest_marker("quick") is None:
            item.add_marker("slow")


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCli]:
    """Runs the command line, each time in a process of its own."""
    with ForkedCli(tmp_path_factory.mktemp("cli")) as server:
        yield server


@pytest.fixture(scope="session")
def elsewhere() -> Iterator[Executor]:
    """A process of its own, kept: for what changes torch for good, as models without memory do."""
    context = multiprocessing.get_context("forkserver")  # the world's: it has imported everything
    context.set_forkserver_preload(IMPORTED_ONCE)
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        yield executor
