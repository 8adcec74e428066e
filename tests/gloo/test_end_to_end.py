"""Whole runs of the shipped model on the embedded task: same numbers in every layout, through
kills, and after a stop.
"""

import gzip
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from forked_cli import ForkedCli
from jobs import run_training
from run_differences import compare_runs, read_lines
from safetensors.torch import load_file
from small_run import QUICKSTART, SMALL_RUN
from world import World

from megatron_opsft.config.load import load_config
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.run.run_files import read_json_lines
from megatron_opsft.run.start.disk import disk_use

# With a constant learning rate the first steps of a run are those of a shorter one.
SMALL = [*SMALL_RUN, "run.steps=3", "checkpoint.every=1", "optimizer.schedule=constant"]


def train_args(run_dir: Path, *more: str) -> list[str]:
    return ["train", QUICKSTART, *SMALL, f"run.dir={run_dir}", *more]


def checkpoints_of(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def undisturbed(cli: ForkedCli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps on one rank."""
    run_dir = tmp_path_factory.mktemp("run") / "undisturbed"
    ended = cli.run(train_args(run_dir))
    assert ended.exit_code == 0, ended.stderr
    return run_dir


@pytest.mark.quick
def test_run_directory_of_one_rank(undisturbed: Path) -> None:
    metrics = read_json_lines(undisturbed / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert line["num_rollouts"] == 24 >= line["num_accepted"] > 0
        assert line["max_accepted_tokens"] <= 200
        times = (f"{phase}_seconds" for phase in ("rollout", "verify", "train", "sync", "step"))
        assert min(line[key] for key in ("loss", "grad_norm", *times)) > 0
    assert [line["step"] for line in read_lines(undisturbed / "evals.jsonl")] == [0, 3]
    assert checkpoints_of(undisturbed) == ["step_000002", "step_000003"]
    # What a start says that they take, and what they take with their metadata.
    config = load_config(undisturbed / "config.yaml")
    use = disk_use(config, read_model_shape(resolve_model("tiny_reasoner")))
    for name, expected in (("checkpoints/step_000003", use.checkpoint), ("hf", use.model)):
        files = [file for file in (undisturbed / name).iterdir() if file.stat().st_size > 100_000]
        assert sum(file.stat().st_size for file in files) == pytest.approx(expected, rel=0.04)
    held = sum(file.stat().st_size for file in (undisturbed / "rollouts").iterdir())
    assert 0 < held < use.rollouts


def test_exported_model_loads_in_transformers(undisturbed: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(undisturbed / "hf")
    tokenizer = AutoTokenizer.from_pretrained(undisturbed / "hf")
    ids = tokenizer("1 + 2", return_tensors="pt").input_ids
    assert math.isfinite(model(input_ids=ids, labels=ids).loss.item())
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary.keys() >= {"base", "final", "steps", "seconds"}
    card = (undisturbed / "hf/README.md").read_text()
    assert f"| {summary['final']['mean_response_tokens']:,.1f} |" in card
    assert f'"{undisturbed}/hf"' in card
    # The messages and the prompt of a problem of the run, with the instruction it had.
    messages = [json.loads(line.strip(" ,")) for line in card.split("\n") if '{"role"' in line]
    (problem,) = {message["content"].partition("\n")[0] for message in messages}
    with gzip.open(undisturbed / "rollouts/step_000001.jsonl.gz", "rt") as lines:
        assert problem in {json.loads(line)["problem"] for line in lines}
    assert messages[-1]["content"].endswith("\\boxed{}.")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert f"\n{text}\n" in card


@pytest.mark.parametrize(
    ("ranks", "budget", "layout"),
    [
        (2, 1000, ["pp=2"]),
        (4, 1000, ["tp=2", "sequence_parallel=true"]),
        (4, 4096, ["tp=2", "pp=2", "sequence_parallel=true"]),
        (4, 500, ["cp=2"]),
    ],
    ids=str,
)
def test_same_rollouts_losses_and_norms_in_layout(
    world: World, undisturbed: Path, tmp_path: Path, ranks: int, budget: int, layout: list[str]
) -> None:
    """In the first two steps: the second samples with what the first has learned. That torchrun's
    ranks do the same to the bit: test_faults.py.
    """
    keys = [f"run.dir={tmp_path}", f"train.max_tokens_per_microbatch={budget}", "run.steps=2"]
    keys += ["checkpoint.every=0", *(f"parallel.{key}" for key in layout)]
    assert world.run(run_training, ranks, QUICKSTART, [*SMALL, *keys]) == [0] * ranks
    for name in ("held_out/step_000000", "rollouts/step_000001", "rollouts/step_000002"):
        name += ".jsonl.gz"
        assert (tmp_path / name).read_bytes() == (undisturbed / name).read_bytes()
    before, found = (read_lines(d / "metrics.jsonl") for d in (undisturbed, tmp_path))
    for one, other in zip(before[:2], found, strict=True):
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
    assert "stopped after step 1, checkpoint step_000001; continue with" in stopped.stdout
    assert [line["step"] for line in read_lines(run_dir / "evals.jsonl")] == [0]
    assert checkpoints_of(run_dir) == ["step_000001"]
    resumed = cli.run([*train_args(run_dir, *more), "--resume"])
    assert resumed.exit_code == 0
    assert "weights: " not in resumed.stderr  # the checkpoint brings them
    assert "continues from checkpoint step_000001: 1 of 2 steps are done" in resumed.stdout
    assert cli.run(train_args(other, *more)).exit_code == 0
    evaluations, undisturbed = (read_lines(d / "evals.jsonl") for d in (run_dir, other))
    assert [line["step"] for line in evaluations] == [0, 1, 2]
    assert evaluations == undisturbed


NOT_FINITE = """
from megatron_opsft.trainer.model import step
losses, calls = step.sum_losses, []
def spoilt(*args):
    calls.append(1)
    factor = float("nan") if len(calls) > 1 else 1.0
    loss_sum, num_tokens, reported = losses(*args)
    return loss_sum * factor, num_tokens, tuple(each * factor for each in reported)
step.sum_losses = spoilt
"""


def test_loss_that_is_not_finite_stops_with_its_responses_saved(
    cli: ForkedCli, undisturbed: Path, tmp_path: Path
) -> None:
    ended = cli.run(train_args(tmp_path), prelude=NOT_FINITE)
    assert ended.exit_code == 3 and "Traceback" not in ended.stderr
    assert "error: phase train of step 2: loss nan" in ended.stderr
    assert "the step was not applied; not finite at rank 0 on " in ended.stderr
    name = "rollouts/step_000002.jsonl.gz"
    assert (tmp_path / name).read_bytes() == (undisturbed / name).read_bytes()
    assert checkpoints_of(tmp_path) == ["step_000001"]
    assert not (tmp_path / "hf").exists()
    assert cli.run([*train_args(tmp_path), "--resume"]).exit_code == 0
    assert compare_runs(undisturbed, tmp_path) == []


def test_a_run_whose_training_ruins_the_model_blames_the_learning_rate(
    cli: ForkedCli, tmp_path: Path
) -> None:
    """Also after a resume, which knows the first step from metrics.jsonl."""
    keys = ["optimizer.lr=0.5", "rollout.max_response_tokens=64", "eval.max_response_tokens=250"]
    keys += ["data.prompts_per_step=16", "eval.num_problems=12", "rollout.batch_size=64"]
    assert cli.run(train_args(tmp_path, *keys, "run.steps=1")).exit_code == 0
    ended = cli.run(train_args(tmp_path, *keys, "run.steps=2", "--resume"))
    assert ended.exit_code == 0, ended.stderr
    first, second = read_lines(tmp_path / "metrics.jsonl")
    assert first["num_accepted"] > 9 and second["num_accepted"] == 0
    said = ended.stderr.splitlines()
    (empty,) = [line for line in said if line.startswith("WARNING step 2 accepted none of 64")]
    blame = f"step 1 accepted {first['num_accepted']} of 64, so training did this"
    assert f"{blame}: most likely lower optimizer.lr=0.5" in empty
    (cut_off,) = [line for line in said if line.startswith("WARNING held-out: 100.0 % of the")]
    assert cut_off.endswith("training did this; most likely lower optimizer.lr=0.5")
    assert "raise " not in ended.stderr
    skipped, place, best, last = said[-4:]
    assert skipped == "WARNING 1 of 2 steps trained on no token and learned nothing"
    assert place.startswith(f"INFO the model is in {tmp_path / 'hf'}; ")
    assert best.startswith("INFO best evaluation: the base model's, ")
    assert last.startswith("WARNING THE MODEL GOT WORSE: held-out accuracy fell from ")
    assert last.endswith(" as the base model; most likely lower optimizer.lr=0.5")
    decline = last.removeprefix("WARNING ").split(";")[0]
    assert f"\n**{decline}.**\n" in (tmp_path / "hf/README.md").read_text()
    assert decline in cli.run(["report", str(tmp_path)]).stdout


def test_nothing_accepted_is_skipped_and_counted(cli: ForkedCli, tmp_path: Path) -> None:
    lengths = ["rollout.max_response_tokens=3", "eval.max_response_tokens=64"]
    ended = cli.run(train_args(tmp_path, *lengths, "run.steps=2"))
    assert ended.exit_code == 0, ended.stderr
    cut_off, first, *_, last = (w for w in ended.stderr.splitlines() if w.startswith("WARNING "))
    assert cut_off.startswith("WARNING held-out: 50.0 % of the responses were cut off")
    assert "step 1 accepted none of 24 responses, so nothing was learned: 24 cut off; " in first
    assert last.startswith("WARNING NOTHING WAS LEARNED: none of 2 steps trained on a token")
    assert f"INFO the model is in {tmp_path / 'hf'}; " in ended.stderr
    assert ended.stdout.count("accepted 0/24 (24 cut off)") == 2
    for line in read_lines(tmp_path / "metrics.jsonl"):
        assert (line["num_accepted"], line["loss"], line["grad_norm"]) == (0, 0.0, 0.0)
    assert json.loads((tmp_path / "summary.json").read_text())["skipped_steps"] == 2
    directories = (resolve_model("tiny_reasoner"), tmp_path / "hf")
    before, after = (load_file(path / "model.safetensors") for path in directories)
    assert all((after[name] == before[name]).all() for name in before)


def test_another_chat_template_is_refused_on_resume(
    cli: ForkedCli, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = shutil.copytree(undisturbed, tmp_path / "run")
    manifest = json.loads((run_dir / "manifest.json").read_text())
    names = {"data_sha256", "held_out_sha256", "judge", "responses_sha256", "example_prompt"}
    names |= {"model"}
    assert names == manifest["identity"].keys() and manifest["identity"]["held_out_sha256"]["eval"]
    manifest["identity"]["example_prompt"] += "Today is the 1st."
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    ended = cli.run([*train_args(run_dir, "run.steps=9"), "--resume"])
    assert "the prompts of tiny_reasoner (data.template=" in ended.error
    assert ") are not those that this run was started with (" in ended.error


def test_killed_run_resumes_bit_identically(
    cli: ForkedCli, undisturbed: Path, tmp_path: Path
) -> None:
    """Killed while a checkpoint was being written, and in the middle of a step."""
    metrics = tmp_path / "metrics.jsonl"
    moments = {
        "in a checkpoint": lambda: any(tmp_path.glob("checkpoints/.partial_*")),
        "in the third step": lambda: metrics.exists() and metrics.read_text().count("\n") >= 2,
    }
    for number, (name, has_come) in enumerate(moments.items()):
        run = cli.start([*train_args(tmp_path), *["--resume=auto"] * (number > 0)])
        deadline = time.monotonic() + 120
        while not has_come():
            assert run.poll() is None and time.monotonic() < deadline, name
            time.sleep(0.001)
        os.kill(run.pid, signal.SIGKILL)
        assert run.wait().exit_code != 0
    ended = cli.run([*train_args(tmp_path), "--resume=auto"])
    assert ended.exit_code == 0, ended.stderr
    assert compare_runs(undisturbed, tmp_path) == []
