"""What gloo tests share: a file's world of worker processes, and one run that nothing disturbed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_cli import ForkedCli
from small_run import FOUR_STEPS, QUICKSTART
from world import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """New workers for each file: what Megatron leaves behind in a process makes later jobs slow."""
    shared = World()
    yield shared
    shared.stop()


@pytest.fixture(scope="session")
def four_steps(cli: ForkedCli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of `FOUR_STEPS` on one rank."""
    run_dir = tmp_path_factory.mktemp("run") / "undisturbed"
    ended = cli.run(["train", QUICKSTART, *FOUR_STEPS, f"run.dir={run_dir}"])
    assert ended.exit_code == 0, ended.stderr
    return run_dir
