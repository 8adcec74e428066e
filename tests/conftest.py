"""Settings of every test, no network and one thread per process, and the command line to call."""

import gc
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import pytest
from forked_cli import FORKS, ForkedCli

gc.disable()  # until all tests are imported: nothing of that goes away
_CACHE = tempfile.TemporaryDirectory(prefix="cache-of-tests-")  # as long as the tests run
os.environ["HF_HOME"] = _CACHE.name
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Also for processes that are not forked, such as a job's ranks and their judges.
_SUPPORT = str(Path(__file__).parent / "support")
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [_SUPPORT, os.environ.get("PYTHONPATH")])  # an empty one is the working directory
)
if "PYTEST_XDIST_WORKER" in os.environ:  # whoever only hands tests out needs none of it
    import preloaded  # noqa: F401


_LONGEST = (
    "slurm",
    "vllm",
    "test_checkpoint.py",  # and with it all that need only the world of ranks
    "test_quickstart.py",
    "test_benchmarks.py",
    "test_gpu_proof.py",
    "test_methods_run.py",
    "test_study_run.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as their folder is called, and as `slow` what has processes of its own, but for
    tests marked `quick`. What takes longest begins first, so that no worker is left alone with it.
    """
    items.sort(key=_place_in_order)
    for item in items:
        folder = item.path.parent.name
        if folder in ("browser", "gpu", "gpu_contract", "slurm", "vllm"):
            item.add_marker(folder)
        has_processes = folder == "gloo" or not {"cli", "elsewhere"}.isdisjoint(
            getattr(item, "fixturenames", ())
        )
        if has_processes and item.get_closest_marker("quick") is None:
            item.add_marker("slow")


def _place_in_order(item: pytest.Item) -> int:
    """Return the place of an item's folder or file in `_LONGEST`; all others come last."""
    names = (item.path.parent.name, item.path.name)
    places = [_LONGEST.index(name) for name in names if name in _LONGEST]
    return min(places, default=len(_LONGEST))


def pytest_collection_finish() -> None:
    """What is there by now is old; hypothesis must find it still."""
    gc.freeze()
    gc.unfreeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """pytest now collects garbage five times over: not through all that was ever imported."""
    gc.freeze()


# In vLLM's folder: what needs none of the folder's ranks, but processes of its own.
_OWN_PROCESSES = ("test_cpu_worker_apart.py", "test_defaults.py")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup` a folder's tests follow each other on one worker where they share
    what takes long to start (vLLM's ranks also spin while they wait for each other, so one at a
    time); so do those that only need the world of ranks, because on two cores the ranks of several
    tests take more time to wait for each other than to compute. Elsewhere a file's tests do.
    xdist's own groups are part of a test's name, which pytest 9.2 does not let it change.
    """
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = PurePath(nodeid.split("::", 1)[0])
            shared = file.parent.name in ("vllm", "browser") or _needs_only_the_world(file)
            return str(file.parent if shared and file.name not in _OWN_PROCESSES else file)

    return GroupScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


@cache
def _needs_only_the_world(file: PurePath) -> bool:
    """True for a file of tests whose ranks are those of `World`; it has no runs of its own."""
    text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
    return "world: World" in text and "cli: ForkedCli" not in text


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCli]:
    """Runs the command line, each time in a process of its own."""
    with ForkedCli(tmp_path_factory.mktemp("cli")) as server:
        yield server


@pytest.fixture(scope="session")
def elsewhere() -> Iterator[Executor]:
    """A process of its own, kept: for what changes torch for good, as models without memory do."""
    with ProcessPoolExecutor(max_workers=1, mp_context=FORKS) as executor:
        yield executor
