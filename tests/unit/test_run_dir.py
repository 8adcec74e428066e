"""The run directory: nothing is lost, nothing of others is deleted, resumed files are exact."""

import json
from pathlib import Path

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.preflight.run_directory import RunDir
from megatron_opsft.runtime.durable import (
    rollout_files,
    rollout_name,
    write_json,
    write_packed_lines,
)


def _finished_run(path: Path) -> RunDir:
    run = RunDir(path)
    run.open(resume=False, overwrite=False)
    run.write_manifest({})
    (path / "config.yaml").write_text("run: {}\n")
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    _save(path, 1)
    return run


def _save(run_dir: Path, step: int, rank: int | None = None) -> None:
    (run_dir / "rollouts").mkdir(exist_ok=True)
    write_packed_lines(run_dir / "rollouts" / rollout_name(step, rank), [{}], level=1)


def test_an_overwrite_that_is_killed_can_be_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _finished_run(tmp_path)
    (tmp_path / "checkpoints" / "step_000001").mkdir()
    (tmp_path / "checkpoints" / "step_000001" / "metadata.json").touch()

    def killed(path: Path, ignore_errors: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", killed)
        run.open(resume=False, overwrite=True)
    run.open(resume=False, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints"}


def test_overwrite_refuses_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("of: another program\n")
    with pytest.raises(UserError, match=r"no manifest\.json"):
        RunDir(tmp_path).open(resume=False, overwrite=True)
    assert (tmp_path / "config.yaml").exists()


def test_overwrite_keeps_an_evaluation_and_what_the_run_reads(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "hf" / "model.safetensors").write_text("")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    with pytest.raises(UserError, match=r"hf, which this run reads; --overwrite would delete"):
        run.open(resume=False, overwrite=True, needed=[tmp_path / "hf"])
    write_json(tmp_path / "manifest.json", {"kind": "evaluation", "versions": {}})
    with pytest.raises(UserError, match="something other than a run"):
        run.open(resume=False, overwrite=True)
    run.write_manifest({})
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
    run.open(resume=False, overwrite=True, needed=[tmp_path.parent])
    assert not (tmp_path / "hf").exists()


def test_files_of_others_where_the_model_will_be_written_are_refused_at_the_start(
    tmp_path: Path,
) -> None:
    run = _finished_run(tmp_path)
    (tmp_path / "hf" / "notes").mkdir(parents=True)
    with pytest.raises(UserError, match=r"hf holds the directory notes, which is not part of a"):
        run.open(resume=True, overwrite=False)


def test_start_beside_foreign_files_and_after_a_start_that_failed(tmp_path: Path) -> None:
    (tmp_path / "slurm.out").write_text("log")
    for resume in (False, True, False):
        RunDir(tmp_path).open(resume=resume, overwrite=False)
    assert (tmp_path / "slurm.out").read_text() == "log"


def test_truncate_keeps_the_bytes_up_to_the_step(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    lines = [json.dumps({"step": n, "loss": 0.1 * n + 1e-17}) + "\n" for n in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 6, "lo')
    evals = ['{"step": 0, "eval_accuracy": 0.5}\n', '{"step": 4, "eval_accuracy": 0.6}\n']
    (tmp_path / "evals.jsonl").write_text("".join(evals))
    for step in range(1, 6):
        _save(tmp_path, step)
        _save(tmp_path, step, rank=3)
    (tmp_path / "checkpoints" / ".partial_000004").mkdir()
    run.truncate(after_step=3)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:3])
    assert (tmp_path / "evals.jsonl").read_text() == evals[0]
    names = [path.name for path in sorted((tmp_path / "rollouts").iterdir())]
    assert names == [f"step_00000{n}{r}.jsonl.gz" for n in (1, 2, 3) for r in ("", "_rank_0003")]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_rollout_files_are_in_the_order_of_steps_and_ranks(tmp_path: Path) -> None:
    written = [(2, 12), (1, 10_000), (1, 9_999), (1_000_000, None)]
    for step, rank in written:
        (tmp_path / rollout_name(step, rank)).touch()
    (tmp_path / "step_000001_rank_003.jsonl.gz").touch()  # no rank of a run is named so
    expected = [(1, 9_999), (1, 10_000), (2, 12), (1_000_000, None)]
    assert rollout_files(tmp_path) == [(s, tmp_path / rollout_name(s, r)) for s, r in expected]
