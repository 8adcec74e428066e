"""What a run keeps and evaluates on its way: exports, the best model, several sets."""

import json
from pathlib import Path

import pytest
import safetensors.numpy
from forked_cli import ForkedCli
from processes import rank_preludes
from run_differences import read_lines
from small_run import QUICKSTART, SMALL_RUN

from megatron_opsft.config import EvalConfig
from megatron_opsft.models.storage.model_paths import ASSETS, TINY_REASONER
from megatron_opsft.run.run_files import best_evaluation

TINY_WEIGHTS = ASSETS / TINY_REASONER / "model.safetensors"
MORE = "{other: {data: arithmetic, num_problems: 2}}"
KEEPING = [
    *SMALL_RUN,
    "run.steps=2",
    "run.eval_every=1",
    "checkpoint.every=1",
    "eval.export_best=true",
    "eval.best_within=1",
    "eval.max_response_tokens=128",
    f"eval.more={MORE}",
    "optimizer.lr=1e-3",
    "optimizer.schedule=constant",
]


# The kernel refuses files as large as a model while best/ is written.
FULL_FOR_BEST = """
import resource
from megatron_opsft.run.record import evaluations
write_best = evaluations.write_best
def write_on_full_disk(*arguments):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    write_best(*arguments)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
evaluations.write_best = write_on_full_disk
"""


def train(cli: ForkedCli, run_dir: Path, *more: str, exit_code: int = 0) -> str:
    ended = cli.run(["train", QUICKSTART, *KEEPING, f"run.dir={run_dir}", *more])
    assert ended.exit_code == exit_code, ended.stderr
    return ended.stdout + ended.stderr


def models_of(run_dir: Path) -> dict[str, bytes]:
    """The weights of every exported model."""
    files = run_dir.rglob("model.safetensors")
    return {file.parent.relative_to(run_dir).as_posix(): file.read_bytes() for file in files}


def test_exports_and_evaluations_are_the_same_through_a_stop(
    cli: ForkedCli, tmp_path: Path
) -> None:
    """best/ by the rule, equal to the byte in a run of two parts."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    out = train(cli, whole)
    assert "other after step 2: accuracy " in out
    assert out.count("\n  -> ") == 3  # a response of each evaluation
    evaluations = read_lines(whole / "evals.jsonl")
    assert [line["step"] for line in evaluations] == [0, 1, 2]
    assert all(line["eval_samples"] == 4 for line in evaluations)
    assert all(line["eval_other_samples"] == 2 for line in evaluations)
    best = best_evaluation(evaluations, EvalConfig(best_within=1))
    assert best is not None and best["step"] > 0
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["best"]["step"] == best["step"]
    models = models_of(whole)
    best_name = f"best/step_{best['step']:06d}"
    assert summary["best"]["model"] == best_name
    last_lines = out.splitlines()[-2:]
    assert any(f"its model is in {whole / best_name}" in line for line in last_lines)
    assert sorted(models) == [best_name, "hf"]
    assert (models[best_name] == models["hf"]) == (best["step"] == 2)
    card = (whole / best_name / "README.md").read_text()
    chosen = evaluations[best["step"]]
    assert f"after {best['step']} steps of `on_policy_sft`" in card
    assert f"Chosen after step {best['step']} as the best of {best['step'] + 1} eval" in card
    assert f" {chosen['eval_mean_response_tokens']:.1f} |\n" in card
    train(cli, parts, "run.max_minutes=1e-9", exit_code=75)
    train(cli, parts, "--resume")
    assert read_lines(parts / "evals.jsonl") == evaluations
    assert models_of(parts) == models
    card_of_parts = (parts / best_name / "README.md").read_text()
    assert card_of_parts == card.replace("whole", "parts")
    responses = [
        {
            path.relative_to(run).as_posix(): path.read_bytes()
            for path in run.rglob("held_out/**/*.gz")
        }
        for run in (whole, parts)
    ]
    names = [
        f"held_out/{folder}step_{n:06d}.jsonl.gz" for folder in ("", "other/") for n in range(3)
    ]
    assert responses[0] == responses[1] and sorted(responses[0]) == sorted(names)


def test_a_best_model_for_which_the_disk_has_no_room_is_a_warning(
    cli: ForkedCli, tmp_path: Path
) -> None:
    """Two ranks: both take part in the stream to its end."""
    words = ["train", QUICKSTART, *KEEPING, f"run.dir={tmp_path}"]
    both = [cli.start(words, prelude + FULL_FOR_BEST) for prelude in rank_preludes(2)]
    first, other = (run.wait() for run in both)
    assert (first.exit_code, other.exit_code) == (0, 0), first.stderr
    assert "could not be written: File too large" in first.stderr
    assert "the best model is not kept, and the run continues" in first.stderr
    assert sorted(models_of(tmp_path)) == ["hf"]


# Every evaluation is the best; the run is killed in the middle of the second model of best/, or
# when it is whole and the first one is not yet gone.
KILLED = """
import os
from megatron_opsft.run.record import evaluations, written_models
evaluations.best_evaluation = lambda lines, settings: lines[-1]
write, drop = written_models.write_hf_model, evaluations.drop_superseded
def torn(stream):
    yield next(stream)
    os._exit(9)
def write_torn(directory, stream, **more):
    write(directory, torn(iter(stream)) if directory.name == "step_000002" else stream, **more)
def drop_never(session, step, **more):
    os._exit(9) if step == 2 else drop(session, step, **more)
"""
MIDDLE = KILLED + "written_models.write_hf_model = write_torn"
BETWEEN = KILLED + "evaluations.drop_superseded = drop_never"


@pytest.mark.parametrize(
    ("prelude", "left"),
    [(MIDDLE, ["step_000001"]), (BETWEEN, ["step_000001", "step_000002"])],
    ids=["middle", "between"],
)
def test_a_kill_leaves_the_old_or_the_new_best_model_whole(
    cli: ForkedCli, tmp_path: Path, prelude: str, left: list[str]
) -> None:
    words = ["train", QUICKSTART, *KEEPING, "checkpoint.keep=1", f"run.dir={tmp_path}"]
    assert cli.run(words, prelude).exit_code == 9
    found = [name for name in models_of(tmp_path) if "/step_" in name and "partial" not in name]
    assert sorted(found) == [f"best/{name}" for name in left]
    for name in found:
        weights = safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
        assert len(weights) == len(safetensors.numpy.load_file(TINY_WEIGHTS))
    assert cli.run([*words, "--resume"], KILLED).exit_code == 0
    models = models_of(tmp_path)
    assert sorted(models) == ["best/step_000002", "hf"]
    assert models["best/step_000002"] == models["hf"]


# Three good steps, and then steps that take the model apart.
FALLING = """
from megatron_opsft.models.storage import hf_writer
from megatron_opsft.run import train
train.learning_rate = lambda step, steps, settings: 5e-4 if step < 4 else 0.05
side_files = hf_writer.side_files
more = {"additional_chat_templates/other.jinja": b"{{ 1 }}"}
hf_writer.side_files = lambda *which: {**side_files(*which), **more}
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_model_gets_worse_ends_with_its_best_one(
    cli: ForkedCli, tmp_path: Path, ranks: int
) -> None:
    words = ["train", QUICKSTART, *SMALL_RUN, "run.steps=8", "run.eval_every=1"]
    words += ["eval.num_problems=8", "eval.max_response_tokens=300", "eval.best_within=0.3"]
    words += ["eval.stop_when_worse=2", "checkpoint.every=0", "optimizer.schedule=constant"]
    words += [f"run.dir={tmp_path}"]
    if ranks == 1:
        (ended,) = [cli.run(words, FALLING)]
    else:
        runs = [cli.start(words, prelude + FALLING) for prelude in rank_preludes(2)]
        ended, _ = [run.wait() for run in runs]
    assert ended.exit_code == 0, ended.stderr
    evaluations = read_lines(tmp_path / "evals.jsonl")
    summary = json.loads((tmp_path / "summary.json").read_text())
    reached, best = summary["steps"], summary["best"]["step"]
    assert 0 < best == summary["model_step"] < reached < 8
    assert [line["step"] for line in evaluations] == [*range(reached + 1)]
    assert summary["worse_in_a_row"] == 2 and summary["base"]["accuracy"] > 0.5
    models = models_of(tmp_path)
    assert models["hf"] == models[f"best/step_{best:06d}"]
    assert (tmp_path / "hf/additional_chat_templates/other.jinja").read_bytes() == b"{{ 1 }}"
    card = (tmp_path / "hf/README.md").read_text()
    assert f"after {best} steps of" in card
    assert f"| {summary['best']['mean_response_tokens']:.1f} |" in card
    said = f"ended after step {reached} of 8, with 2 evaluations in a row less accurate"
    assert said in ended.stderr
    assert f"hf/ holds the best model, of step {best}" in ended.stderr
    if ranks == 1:
        again = cli.run([*words, "--resume"])
        assert "the run is finished; nothing is left" in again.stdout
        assert "hf/ holds the model of step" in cli.run(["report", tmp_path]).stdout
        # It has a checkpoint to go on from, for one who wants to see what comes of it.
        words += ["--resume", "eval.stop_when_worse=0", f"run.steps={reached + 1}"]
        more = cli.run(words, FALLING)
        assert more.exit_code == 0, more.stderr
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["steps"] == summary["model_step"] == reached + 1
        assert "worse_in_a_row" not in summary
