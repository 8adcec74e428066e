"""A checkpoint that is written while the GPU goes on; on a CPU: tests/gloo/test_checkpoint.py."""

from dataclasses import replace
from pathlib import Path

import pytest
from jobs import Case, as_arrays, build, exported, train_steps

from megatron_opsft.model.checkpoint import Checkpointer


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
