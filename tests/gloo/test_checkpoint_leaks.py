"""What is left of a checkpoint when its end, or that of an older one, is disturbed: nothing."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import Case, build
from processes import wait_until
from world import World

from megatron_opsft.errors import UserError
from megatron_opsft.run.start.run_directory import RunDir
from megatron_opsft.trainer.model.checkpoint import Checkpointer

OLD, REPLACED, NEW = "step_000001", ".partial_replaced_000001", "step_000002"


def fail(*unused: Any, ignore_errors: bool = False) -> None:
    if not ignore_errors:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def delete_one_file(old: list[Path]) -> None:
    """As far as a killed run came."""
    for path in old:
        next(path.glob("*.distcp")).unlink()


def save_twice(run_dir: Path, name: str, fault: Callable[..., None]) -> Any:
    """Steps 1 and 2, one of which is kept, the second with a fault in a function of the package:
    what is there then, and the warnings and errors.
    """
    directory, trainer = run_dir / "checkpoints", build(Case()).trainer
    saver = Checkpointer(directory, trainer.models, trainer.optimizer, keep=1)
    saver.save(1, {})
    said: list[str] = []
    log = SimpleNamespace(warning=lambda text, *values: said.append(text % values))
    with pytest.MonkeyPatch.context() as faults:
        faults.setattr(f"megatron_opsft.{name}", fault)
        faults.setattr("megatron_opsft.trainer.model.checkpoint.log", log)
        try:
            saver.save(2, {})
        except UserError as caught:
            said.append(str(caught))
    return sorted(path.name for path in directory.iterdir()), said


@pytest.mark.parametrize(
    ("name", "fault", "left", "words"),
    [
        # A kill while an old one is deleted; one that cannot appear; an old one that has to stay.
        ("trainer.model.checkpoint._delete", delete_one_file, [REPLACED, NEW], ""),
        ("runtime.durable.sync_path", fail, [OLD], "cannot write {}/step_000002: Input/output"),
        ("runtime.durable.shutil.rmtree", fail, [REPLACED, NEW], "an old checkpoint, {}/.partial"),
    ],
)
def test_a_fault_leaves_whole_checkpoints_and_what_a_resume_deletes(
    world: World, tmp_path: Path, name: str, fault: Callable[..., None], left: list[str], words: str
) -> None:
    ((there, said),) = world.run(save_twice, 1, tmp_path, name, fault)
    directory = tmp_path / "checkpoints"
    assert there == left and len(said) == bool(words)
    assert "".join(said).startswith(words.format(directory))
    (tmp_path / "rollouts").mkdir()
    RunDir(tmp_path).truncate(after_step=2)
    assert [path.name for path in directory.iterdir()] == left[-1:]


def fill_the_disk(directory: Path) -> tuple[list[Path], list[Path], str | None]:
    """What is there of a checkpoint that does not fit, when its files have failed: before the run
    asks for it and after; and what it says.
    """
    trainer = build(Case()).trainer
    saver = Checkpointer(directory, trainer.models, trainer.optimizer, keep=1)
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
    assert before == after == []
    assert failure is not None and "File too large" in failure
    assert f"cannot write {tmp_path / '.partial_000001'} (" in failure and "(0 bytes" not in failure
