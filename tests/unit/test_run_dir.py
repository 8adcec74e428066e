"""The run directory: nothing is lost, nothing of others is deleted, resumed files are exact."""

import json
from pathlib import Path

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.run.start.run_directory import RunDir, held_out_files
from megatron_opsft.runtime.durable import rollout_files, rollout_name, write_json


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """One with a step, a checkpoint, and a model."""
    run = RunDir(tmp_path)
    run.open(resume=False, overwrite=False)
    run.write_manifest({})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for file in ("checkpoints/step_000001/a", "hf/config.json", "hf/model.safetensors"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    return run


def test_an_overwrite_that_is_killed_can_be_given_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, ignore_errors: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", killed)
        run.open(resume=False, overwrite=True)
    run.open(resume=False, overwrite=True)
    assert [path.name for path in run.path.rglob("*")] == ["checkpoints"]


def test_overwrite_keeps_an_evaluation_and_what_the_run_reads(run: RunDir) -> None:
    before = sorted(run.path.rglob("*"))
    with pytest.raises(UserError, match=r"hf, which this run reads; --overwrite would delete"):
        run.open(resume=False, overwrite=True, needed=[run.path / "hf"])
    write_json(run.path / "manifest.json", {"kind": "evaluation", "versions": {}})
    with pytest.raises(UserError, match="something other than a run"):
        run.open(resume=False, overwrite=True)
    assert sorted(run.path.rglob("*")) == before
    run.write_manifest({})
    run.open(resume=False, overwrite=True, needed=[run.path.parent])
    assert not (run.path / "hf").exists()


def test_overwrite_keeps_a_link_to_another_disk_and_what_others_have_there(
    run: RunDir, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    (run.path / "checkpoints").rename(disk)
    (disk / "step_of_mine").touch()
    (disk / ".partial_step_000002").mkdir()
    (run.path / "checkpoints").symlink_to(disk)
    run.open(resume=False, overwrite=True)
    assert (run.path / "checkpoints").is_symlink()
    assert [path.name for path in disk.iterdir()] == ["step_of_mine"]


def test_files_of_others_where_the_model_will_be_written_are_refused_at_the_start(
    run: RunDir,
) -> None:
    (run.path / "hf/notes").mkdir()
    with pytest.raises(UserError, match=r"hf holds notes, which is not part of a"):
        run.open(resume=True, overwrite=False)


def test_truncate_keeps_the_bytes_up_to_the_step(run: RunDir) -> None:
    lines = [json.dumps({"step": n, "loss": 0.1 * n + 1e-17}) + "\n" for n in range(1, 6)]
    (run.path / "metrics.jsonl").write_text("".join(lines) + '{"step": 6, "lo')
    evals = ['{"step": 0, "eval_accuracy": 0.5}\n', '{"step": 4, "eval_accuracy": 0.6}\n']
    (run.path / "evals.jsonl").write_text("".join(evals))
    (run.path / "rollouts").mkdir()
    names = [rollout_name(step, rank) for step in range(1, 6) for rank in (None, 3)]
    for name in (*(f"rollouts/{name}" for name in names), "checkpoints/.partial_000004/a"):
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).touch()
    held_out = [f"{folder}{rollout_name(step)}" for folder in ("", "hard/") for step in (0, 3, 4)]
    for name in held_out:
        (run.path / "held_out" / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / "held_out" / name).touch()
    run.truncate(after_step=3)
    assert (run.path / "metrics.jsonl").read_text() == "".join(lines[:3])
    assert (run.path / "evals.jsonl").read_text() == evals[0]
    assert sorted(path.name for path in (run.path / "rollouts").iterdir()) == names[:6]
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step_000001"]

    def kept() -> list[str]:
        folder = run.path / "held_out"
        return [str(path.relative_to(folder)) for _, path in held_out_files(run.path)]

    assert kept() == [held_out[n] for n in (0, 1, 3, 4)]
    run.truncate(after_step=0)  # a fresh start makes the evaluation before the first step again
    assert kept() == []


def test_rollout_files_are_in_the_order_of_steps_and_ranks(tmp_path: Path) -> None:
    expected = [(1, 9_999), (1, 10_000), (2, 12), (1_000_000, None)]
    for step, rank in reversed(expected):
        (tmp_path / rollout_name(step, rank)).touch()
    (tmp_path / "step_000001_rank_003.jsonl.gz").touch()  # no rank of a run is named so
    assert rollout_files(tmp_path) == [(s, tmp_path / rollout_name(s, r)) for s, r in expected]
