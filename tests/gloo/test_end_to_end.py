"""Whole runs of the shipped model on the embedded task: same numbers in every layout, through
kills, and after a stop.
"""

import json
import math
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from forked_cli import ROOT, ForkedCli
from jobs import run_training
from run_differences import compare_runs, read_lines
from small_run import QUICKSTART, SMALL_RUN
from world import World

# With a constant learning rate the first steps of a run are those of a shorter one.
SMALL = [*SMALL_RUN, "run.steps=3", "checkpoint.every=1", "optimizer.schedule=constant"]


def train_args(run_dir: Path, *more: str) -> list[str]:
    return ["train", QUICKSTART, *SMALL, f"run.dir={run_dir}", *more]


def rollouts_of(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run_dir / "rollouts").iterdir()}


@pytest.fixture(scope="module")
def undisturbed(cli: ForkedCli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps on one rank."""
    run_dir = tmp_path_factory.mktemp("run") / "undisturbed"
    ended = cli.run(train_args(run_dir))
    assert ended.exit_code == 0, ended.stderr
    return run_dir


@pytest.mark.quick
def test_run_directory_of_one_rank(undisturbed: Path) -> None:
    metrics = read_lines(undisturbed / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert line["num_rollouts"] == 24
        assert 0 < line["num_accepted"] <= 24
        assert line["loss"] > 0 and line["grad_norm"] > 0
        assert line["max_accepted_tokens"] <= 200
    full = json.loads((undisturbed / "metrics.jsonl").read_text().splitlines()[0])
    for phase in ("rollout", "verify", "train", "sync", "step"):
        assert full[f"{phase}_seconds"] > 0
    assert [line["step"] for line in read_lines(undisturbed / "evals.jsonl")] == [0, 3]
    checkpoints = sorted(path.name for path in (undisturbed / "checkpoints").iterdir())
    assert checkpoints == ["step_000002", "step_000003"]
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary.keys() >= {"base", "final", "steps", "seconds"}


def test_exported_model_loads_in_transformers(undisturbed: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(undisturbed / "hf")
    tokenizer = AutoTokenizer.from_pretrained(undisturbed / "hf")
    ids = tokenizer("1 + 2", return_tensors="pt").input_ids
    assert math.isfinite(float(model(input_ids=ids, labels=ids).loss))
    final = json.loads((undisturbed / "summary.json").read_text())["final"]
    card = (undisturbed / "hf/README.md").read_text()
    assert f"| {final['mean_response_tokens']:,.1f} |" in card and f'"{undisturbed}/hf"' in card


def in_layout(tp: int, pp: int, budget: int, cp: int) -> list[str]:
    return [
        f"parallel.tp={tp}",
        f"parallel.pp={pp}",
        f"parallel.cp={cp}",
        f"parallel.sequence_parallel={tp > 1}",
        f"train.max_tokens_per_microbatch={budget}",
        "checkpoint.every=0",
        "run.steps=2",
    ]


@pytest.mark.parametrize(
    ("tp", "pp", "ranks", "budget", "cp"),
    [
        (1, 2, 2, 1000, 1),
        (2, 1, 4, 1000, 1),
        (2, 2, 4, 4096, 1),
        (1, 1, 4, 500, 2),
    ],
)
def test_same_rollouts_losses_and_norms_in_layout(
    world: World,
    undisturbed: Path,
    tmp_path: Path,
    tp: int,
    pp: int,
    ranks: int,
    budget: int,
    cp: int,
) -> None:
    """In the first two steps: the second samples with what the first has learned. That torchrun's
    ranks do the same to the bit: test_faults.py.
    """
    run_dir = tmp_path / "run"
    overrides = [*SMALL, f"run.dir={run_dir}", *in_layout(tp, pp, budget, cp)]
    assert world.run(run_training, ranks, QUICKSTART, overrides) == [0] * ranks
    rollouts, expected = rollouts_of(run_dir), rollouts_of(undisturbed)
    assert len(rollouts) == 2 and rollouts.items() <= expected.items()
    before, found = (read_lines(d / "metrics.jsonl")[:2] for d in (undisturbed, run_dir))
    for one, other in zip(before, found, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        for key in ("num_accepted", "accuracy", "trained_tokens", "max_accepted_tokens"):
            assert other[key] == one[key]


def test_a_stop_comes_before_a_due_evaluation_which_the_resumed_run_makes_up_for(
    cli: ForkedCli, tmp_path: Path
) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    more = ["run.steps=2", "run.eval_every=1", "checkpoint.every=0"]
    stopped = cli.run(train_args(run_dir, *more, "run.max_minutes=1e-9"))
    assert stopped.exit_code == 75
    assert "weights: " in stopped.stderr
    last = "stopped after step 1, checkpoint step_000001; continue with --resume"
    assert stopped.stdout.splitlines()[-1] == last
    assert [line["step"] for line in read_lines(run_dir / "evals.jsonl")] == [0]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000001"]
    resumed = cli.run([*train_args(run_dir, *more), "--resume"])
    assert resumed.exit_code == 0
    assert "weights: " not in resumed.stderr  # the checkpoint brings them
    assert "continues from checkpoint step_000001: 1 of 2 steps are done" in resumed.stdout
    again = cli.run([*train_args(run_dir, *more), "--resume"])
    assert again.exit_code == 0
    assert again.stdout == f"{run_dir}: the run is finished; nothing is left\n"
    assert cli.run(train_args(other, *more)).exit_code == 0
    evaluations = read_lines(run_dir / "evals.jsonl")
    assert [line["step"] for line in evaluations] == [0, 1, 2]
    assert evaluations == read_lines(other / "evals.jsonl")


NOT_FINITE = """
from megatron_opsft.model import step
losses, calls = step._sum_losses, []
def spoilt(*args):
    calls.append(1)
    factor = float("nan") if len(calls) > 1 else 1.0
    loss_sum, num_tokens, reported = losses(*args)
    return loss_sum * factor, num_tokens, tuple(each * factor for each in reported)
step._sum_losses = spoilt
"""


def test_loss_that_is_not_finite_stops_with_its_responses_saved(
    cli: ForkedCli, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    ended = cli.run(train_args(run_dir), prelude=NOT_FINITE)
    assert ended.exit_code == 3
    assert "Traceback" not in ended.stderr
    assert "error: phase train of step 2: loss nan" in ended.stderr
    assert "the step was not applied; not finite at rank 0 on " in ended.stderr
    name = "rollouts/step_000002.jsonl.gz"
    assert (run_dir / name).read_bytes() == (undisturbed / name).read_bytes()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000001"]
    assert not (run_dir / "hf").exists()
    assert cli.run([*train_args(run_dir), "--resume"]).exit_code == 0
    assert compare_runs(undisturbed, run_dir) == []


def test_nothing_accepted_is_skipped_and_counted(cli: ForkedCli, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    lengths = ["rollout.max_response_tokens=3", "eval.max_response_tokens=64"]
    ended = cli.run(train_args(run_dir, *lengths, "run.steps=2"))
    assert ended.exit_code == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("WARNING ")]
    cut_off, first, *_, last = said
    assert cut_off.startswith("WARNING held-out: 50.0 % of the responses were cut off")
    assert "step 1 accepted none of 24 responses, so nothing was learned: 24 cut off; " in first
    assert "; raise rollout.max_response_tokens=3" in first
    assert last.startswith("WARNING NOTHING WAS LEARNED: none of 2 steps accepted a response")
    assert ended.stdout.count("accepted 0/24 (24 cut off)") == 2
    report = cli.run(["report", run_dir]).stdout
    assert "NOTHING WAS LEARNED: none of 2 steps accepted a response" in report
    for line in read_lines(run_dir / "metrics.jsonl"):
        assert (line["num_accepted"], line["loss"], line["grad_norm"]) == (0, 0.0, 0.0)
    assert json.loads((run_dir / "summary.json").read_text())["skipped_steps"] == 2
    shipped = ROOT / "megatron_opsft/assets/tiny_reasoner/model.safetensors"
    from safetensors.torch import load_file

    before, after = load_file(shipped), load_file(run_dir / "hf/model.safetensors")
    assert all((after[name] == before[name]).all() for name in after)


def test_another_chat_template_is_refused_on_resume(
    cli: ForkedCli, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = shutil.copytree(undisturbed, tmp_path / "run")
    manifest = json.loads((run_dir / "manifest.json").read_text())
    manifest["identity"]["example_prompt"] += "Today is the 1st."
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    ended = cli.run([*train_args(run_dir, "run.steps=9"), "--resume"])
    assert ended.exit_code == 2
    assert "a run with example_prompt=" in ended.stderr


def test_killed_run_resumes_bit_identically(
    cli: ForkedCli, undisturbed: Path, tmp_path: Path
) -> None:
    """Killed while a checkpoint was being written, and in the middle of a step."""
    run_dir = tmp_path / "run"
    metrics, checkpoints = run_dir / "metrics.jsonl", run_dir / "checkpoints"
    moments = {
        "in a checkpoint": lambda: any(checkpoints.glob(".partial_*")),
        "in the third step": lambda: metrics.exists() and metrics.read_text().count("\n") >= 2,
    }
    for number, (name, has_come) in enumerate(moments.items()):
        run = cli.start([*train_args(run_dir), *["--resume=auto"] * (number > 0)])
        deadline = time.monotonic() + 120
        while not has_come():
            assert run.poll() is None and time.monotonic() < deadline, name
            time.sleep(0.001)
        os.kill(run.pid, signal.SIGKILL)
        assert run.wait().exit_code != 0
    ended = cli.run([*train_args(run_dir), "--resume=auto"])
    assert ended.exit_code == 0, ended.stderr
    assert compare_runs(undisturbed, run_dir) == []
