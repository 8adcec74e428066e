"""A checkpoint that could not be written counts as none: a run that leaves writes it again."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.run.record.recorder import RunRecorder


class Disk:
    """A checkpointer on a disk that is full until it is not."""

    published = None

    def __init__(self) -> None:
        self.is_full, self.saved = True, list[int]()

    def start(self, step: int, about: Any, *, in_background: bool) -> None:
        self.pending = step

    def finish(self, *, wait: bool) -> str | None:
        pending, self.pending = getattr(self, "pending", None), None
        if pending is not None and self.is_full:
            return "no space"
        self.saved += [pending] if pending is not None else []
        return None

    def save(self, step: int, about: Any) -> None:
        if self.is_full:
            raise UserError("no space")
        self.saved.append(step)


def recorder(disk: Disk, *, asynchronous: bool) -> RunRecorder:
    made = object.__new__(RunRecorder)
    made._s = SimpleNamespace(  # type: ignore[assignment]
        checkpointer=disk,
        method=SimpleNamespace(state=SimpleNamespace(model_dump=dict)),
        config=SimpleNamespace(checkpoint=SimpleNamespace(asynchronous=asynchronous)),
        shards=SimpleNamespace(adapters={}),
    )
    made._watch = SimpleNamespace(phase=lambda name: nullcontext())  # type: ignore[assignment]
    made._base_sha256 = "abc"
    made._log, made._callbacks, made._published, made._saved_step = None, (), None, 0
    return made


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_leaves_writes_a_failed_checkpoint_again(asynchronous: bool) -> None:
    disk = Disk()
    run = recorder(disk, asynchronous=asynchronous)
    run.checkpoint(20)
    with pytest.raises(UserError, match="no space"):
        run.checkpoint(20, leaving=True)
    disk.is_full = False
    run.checkpoint(20, leaving=True)
    assert disk.saved == [20]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_that_is_on_disk_is_not_written_again(asynchronous: bool) -> None:
    disk = Disk()
    disk.is_full = False
    run = recorder(disk, asynchronous=asynchronous)
    run.checkpoint(20)
    run.checkpoint(20, leaving=True)
    assert disk.saved == [20]
