"""What a run writes to its disk, and what is said at its start where that does not fit."""

import os
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_run import QUICKSTART

from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.models.storage.replacing import check_out
from megatron_opsft.run.start import disk
from megatron_opsft.run.start.disk import check_disk, describe_bytes, disk_use
from megatron_opsft.runtime.durable import COMPLETE, describe_failed_write

SHAPE = read_model_shape(resolve_model("tiny_reasoner"))
MODEL = (resolve_model("tiny_reasoner") / "model.safetensors").stat().st_size // 4 * 4
MIB = 1 << 20


def config_of(run_dir: Path, *words: str) -> Config:
    words = ("rollout.max_response_tokens=100", *words)
    return load_config(Path(QUICKSTART), [f"run.dir={run_dir}", "model.dtype=float32", *words])


def with_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(disk, "disk_usage", lambda _: usage(0, 0, num_bytes))


@pytest.mark.parametrize(
    ("words", "checkpoint", "models"),
    [
        ([], 3.0, 1),
        (["eval.export_best=true"], 3.0, 1 + 2 + 2),
        (["eval.stop_when_worse=2", "run.eval_every=1"], 3.0, 1 + 2 + 2),
        (["model.dtype=bfloat16"], 3.5, 0.5),
        # A reference that may be replaced is in the checkpoint, in the model's dtype.
        (["method.name=grpo"], 3.0, 1),
        (["method.name=self_distillation", "method.refresh_every=5"], 4.0, 1),
        (["method.name=thinkprune", "method.limits=[9,8]", "method.stage_steps=[5]"], 4.0, 1),
    ],
)
def test_bytes_of_checkpoints_and_models(
    tmp_path: Path, words: list[str], checkpoint: float, models: float
) -> None:
    """In units of the float32 model, whose file has a small header."""
    use = disk_use(config_of(tmp_path, *words), SHAPE)
    assert use.checkpoint / MODEL == pytest.approx(checkpoint, rel=0.01)
    assert use.models / MODEL == pytest.approx(models, rel=0.01)
    assert use.checkpoints == 3 * use.checkpoint  # keep=2, and the one that is written


def test_bytes_of_responses(tmp_path: Path) -> None:
    words = ["run.steps=7", "data.prompts_per_step=4", "rollout.group_size=2"]
    assert disk_use(config_of(tmp_path, *words), SHAPE).rollouts == 5 * 7 * 4 * 2 * 100
    words.append("run.save_logprobs=true")
    assert disk_use(config_of(tmp_path, *words), SHAPE).rollouts == 14 * 7 * 4 * 2 * 100
    words += ["eval.num_problems=6", "eval.samples_per_problem=3", "eval.max_response_tokens=40"]
    for more, num_evaluations, num_responses in (
        ("run.eval_every=3", 4, 6 * 3),  # after steps 0, 3, 6 and 7
        ("run.eval_every=0", 2, 6 * 3),
        ("run.steps=0", 1, 6 * 3),
        ("eval.more={hard: {data: arithmetic, num_problems: 2}}", 1, 6 * 3 + 2 * 3),
    ):
        words.append(more)
        held_out = disk_use(config_of(tmp_path, *words), SHAPE).held_out
        assert held_out == 5 * num_evaluations * num_responses * 40
    words.append("run.save_rollouts=false")
    assert disk_use(config_of(tmp_path, *words), SHAPE).held_out == 0
    assert disk_use(config_of(tmp_path, *words), SHAPE).rollouts == 0


def test_a_disk_without_room_for_one_checkpoint_is_refused_and_for_few_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path / "run")
    use = disk_use(config, SHAPE)
    for free, resume, refused, warned in (
        (use.checkpoint + use.model - 1, False, True, False),
        (use.checkpoint + use.model, False, False, True),
        (use.checkpoints + use.model - 1, True, False, True),
        (use.checkpoints + use.model, False, False, False),
    ):
        with_free(monkeypatch, free)
        if refused:
            said = r"checkpoint takes 8\.\d+ MB and hf/ 2\.\d+ MB, and 10\.\d+ MB are free"
            with pytest.raises(UserError, match=said):
                check_disk(config, SHAPE, resume=resume)
        else:
            warning = check_disk(config, SHAPE, resume=resume)
            assert ("lower checkpoint.keep" in warning) == warned


def test_what_a_run_has_written_counts_when_it_is_resumed_and_is_free_when_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, "run.save_rollouts=false")
    use = disk_use(config, SHAPE)
    for step in (1, 2):
        path = tmp_path / f"checkpoints/step_{step:06d}"
        path.mkdir(parents=True)
        (path / COMPLETE).write_text("{}")
        with open(path / "data", "wb") as file:
            file.truncate(use.checkpoint)
    with_free(monkeypatch, use.checkpoint + use.model)
    assert check_disk(config, SHAPE, resume=True) == ""  # the third, and the model
    with_free(monkeypatch, use.model)
    with pytest.raises(UserError, match="make room"):
        check_disk(config, SHAPE, resume=True)
    with_free(monkeypatch, use.checkpoint + use.model - 4)
    assert check_disk(config, SHAPE, resume=False) == ""  # both are deleted first
    # Checkpoints on another disk, where hf/ does not go.
    monkeypatch.setattr(disk, "_device", lambda path: path.name == "checkpoints")
    with_free(monkeypatch, use.checkpoint)
    assert check_disk(config, SHAPE, resume=True) == ""


def test_responses_that_may_fill_the_disk_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of steps and of evaluations together, less those that the run has written."""
    words = ["run.steps=7", "data.prompts_per_step=4", "rollout.group_size=2"]
    words += ["eval.num_problems=6", "eval.samples_per_problem=1", "run.eval_every=0"]
    words += ["eval.max_response_tokens=40"]
    config = config_of(tmp_path, *words)
    use = disk_use(config, SHAPE)
    num_bytes = 5 * 7 * 4 * 2 * 100 + 5 * 2 * 6 * 40
    enough = use.checkpoints + use.models + num_bytes
    with_free(monkeypatch, enough)
    assert check_disk(config, SHAPE, resume=False) == ""
    with_free(monkeypatch, enough - 1)
    said = check_disk(config, SHAPE, resume=False)
    assert "a full disk would end the run" in said and "set run.save_rollouts=false" in said
    for folder in ("rollouts", "held_out/hard"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "step_000000.jsonl.gz").write_bytes(bytes(100))
    with_free(monkeypatch, enough - 200)
    assert check_disk(config, SHAPE, resume=True) == ""
    assert check_disk(config, SHAPE, resume=False) == ""  # they are deleted first
    with_free(monkeypatch, enough - 201)
    assert check_disk(config, SHAPE, resume=True) == said.replace(
        describe_bytes(enough - 1), describe_bytes(enough - 201)
    ).replace(describe_bytes(num_bytes), describe_bytes(num_bytes - 200))


def test_no_inodes_left_is_said_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(28, "No space left on device")
    assert "No space left on device" in describe_failed_write(tmp_path / "x", 12, full)
    sizes = {"f_bavail": 9, "f_blocks": 9, "f_bfree": 9, "f_frsize": 4096}
    inodes: Any = SimpleNamespace(f_files=20, f_favail=0, **sizes)
    with monkeypatch.context() as context:
        context.setattr(os, "statvfs", lambda _: inodes)
        said = describe_failed_write(tmp_path / "x", 12, full)
    assert "no inodes left: it holds 20 files and folders" in said and "delete some" in said


def test_a_mount_point_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with pytest.raises(UserError, match="is a mount point, which cannot be replaced"):
        check_out(tmp_path, [], overwrite=True)
