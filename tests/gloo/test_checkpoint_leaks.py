"""What is left of a checkpoint when its end, or that of an older one, is disturbed: nothing."""

import errno
import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Case, build
from test_launch_local import wait_until
from world import World

from megatron_opsft.errors import UserError
from megatron_opsft.model.checkpoint import Checkpointer
from megatron_opsft.preflight.run_directory import RunDir
from megatron_opsft.runtime.durable import list_checkpoints

EIO = OSError(errno.EIO, os.strerror(errno.EIO))


def fail(*unused: Any, ignore_errors: bool = False) -> None:
    if not ignore_errors:
        raise EIO


def delete_one_file(old: list[Path]) -> None:
    """As far as a killed run came."""
    for path in old:
        next(path.glob("*.distcp")).unlink()


def save_twice(run_dir: Path, name: str, fault: Callable[..., None]) -> Any:
    """Steps 1 and 2, one of which is kept, the second with a fault in a function of the package:
    what is there then, the warnings, and the error if there is one.
    """
    built = build(Case())
    directory = run_dir / "checkpoints"
    saver = Checkpointer(directory, built.trainer.models, built.trainer.optimizer, keep=1)
    saver.save(1, {})
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("megatron_opsft").addHandler(handler)
    error = ""
    with pytest.MonkeyPatch.context() as faults:
        faults.setattr(f"megatron_opsft.{name}", fault)
        try:
            saver.save(2, {})
        except UserError as caught:
            error = str(caught)
    logging.getLogger("megatron_opsft").removeHandler(handler)
    there = sorted(path.name for path in directory.iterdir())
    return there, [record.getMessage() for record in records], error


def test_a_kill_while_an_old_one_is_deleted_leaves_what_a_resume_deletes(
    world: World, tmp_path: Path
) -> None:
    fault = "model.checkpoint._delete", delete_one_file
    ((there, _, error),) = world.run(save_twice, 1, tmp_path, *fault)
    assert (there, error) == ([".partial_replaced_000001", "step_000002"], "")
    (tmp_path / "rollouts").mkdir()
    RunDir(tmp_path).truncate(after_step=2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]


def test_an_error_when_one_appears_leaves_only_the_one_before(world: World, tmp_path: Path) -> None:
    ((there, _, error),) = world.run(save_twice, 1, tmp_path, "runtime.durable.sync_path", fail)
    assert there == ["step_000001"]
    written = tmp_path / "checkpoints" / "step_000002"
    assert error.startswith(f"cannot write {written}: Input/output error; make room")


def test_an_old_one_that_cannot_be_deleted_is_a_warning(world: World, tmp_path: Path) -> None:
    ((there, warnings, error),) = world.run(
        save_twice, 1, tmp_path, "runtime.durable.shutil.rmtree", fail
    )
    old = tmp_path / "checkpoints" / ".partial_replaced_000001"
    assert warnings == [f"an old checkpoint, {old}, cannot be deleted: Input/output error"]
    assert (there, error) == ([old.name, "step_000002"], "")
    assert list_checkpoints(tmp_path / "checkpoints")[0].name == "step_000002"


def fill_the_disk(directory: Path) -> tuple[list[Path], list[Path], str | None]:
    """What is there of a checkpoint that does not fit, when its files have failed: before the run
    asks for it and after; and what it says.
    """
    built = build(Case())
    saver = Checkpointer(directory, built.trainer.models, built.trainer.optimizer, keep=1)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_100_000, hard))
    saver.start(1, {})
    wait_until(lambda: not saver.is_writing)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    before = [*directory.iterdir()]
    failure = saver.finish()
    return before, [*directory.iterdir()], failure


def test_one_that_does_not_fit_makes_room_at_once(world: World, tmp_path: Path) -> None:
    """What the run itself writes before it asks for the checkpoint needs that room."""
    ((before, after, failure),) = world.run(fill_the_disk, 1, tmp_path)
    assert (before, after) == ([], [])
    assert failure is not None and "File too large" in failure
    assert f"cannot write {tmp_path / '.partial_000001'} (" in failure and "(0 bytes" not in failure
