"""A checkpoint that is written while the GPU goes on; on a CPU: tests/gloo/test_checkpoint.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Case, as_arrays, build, exported, train_steps
from plan_jobs import planned_run

from megatron_opsft.commands.plan.memory import checkpoint_bytes
from megatron_opsft.runtime.pinned import ALIGNMENT, HostCopies
from megatron_opsft.trainer.model.checkpoint import Checkpointer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_background_checkpoint_holds_what_was_there_when_it_began(
    tmp_path: Path, dtype: str
) -> None:
    case = replace(Case(device_name="cuda"), dtype=dtype)
    built = build(case)
    train_steps(built, case, range(2))
    then = as_arrays(exported(built))
    saver = Checkpointer(tmp_path, built.trainer.models, built.trainer.optimizer, keep=1)
    saver.start(2, {})
    train_steps(built, case, range(2, 4))
    assert saver.finish() is None
    later = as_arrays(exported(built))
    assert any((later[name] != then[name]).any() for name in then)
    assert saver.load_newest()["step"] == 2  # type: ignore[index]
    loaded = as_arrays(exported(built))
    assert all((loaded[name] == then[name]).all() for name in then)


def test_a_checkpoint_pins_what_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block; none of torch's own pinned memory, whose blocks are powers of two."""
    case = Case(device_name="cuda", dtype="bfloat16")
    built = build(case)
    copies: list[torch.Tensor] = []
    take = HostCopies.take

    def noted(self: HostCopies, *tensors: Any, **how: Any) -> list[torch.Tensor]:
        copies.extend(take(self, *tensors, **how))
        return copies

    monkeypatch.setattr(HostCopies, "take", noted)
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    saver = Checkpointer(tmp_path, built.trainer.models, built.trainer.optimizer, keep=1)
    saver.save(1, {})
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before
    assert len(copies) > 50 and all(copy.is_pinned() for copy in copies)
    first, last = copies[0], copies[-1]
    pinned = last.data_ptr() + last.nbytes - first.data_ptr()
    saved = checkpoint_bytes(planned_run(case, tokens=512))["saved_bytes"]
    assert sum(copy.nbytes for copy in copies) == saved
    assert saved <= pinned < saved + len(copies) * ALIGNMENT
