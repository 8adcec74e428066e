"""What a run keeps and evaluates on its way: exports, the best model, several sets."""

import json
from pathlib import Path

from forked_cli import ForkedCli
from processes import rank_environments
from run_differences import read_lines
from small_run import QUICKSTART, SMALL_RUN

from megatron_opsft.report.runs import best_evaluation

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
from megatron_opsft.run.evaluations import ModelExports
write_best = ModelExports.write_best
def write_on_full_disk(self, step):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    write_best(self, step)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
ModelExports.write_best = write_on_full_disk
"""


def train(cli: ForkedCli, run_dir: Path, *more: str, exit_code: int = 0) -> str:
    ended = cli.run(["train", QUICKSTART, *KEEPING, f"run.dir={run_dir}", *more])
    assert ended.exit_code == exit_code, ended.stderr
    return ended.stdout


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
    best = best_evaluation(evaluations, within=1)
    assert best is not None and best["step"] > 0
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["best"]["step"] == best["step"]
    models = models_of(whole)
    best_name = f"best/step_{best['step']:06d}"
    assert sorted(models) == [best_name, "hf"]
    assert (models[best_name] == models["hf"]) == (best["step"] == 2)
    train(cli, parts, "run.max_minutes=1e-9", exit_code=75)
    train(cli, parts, "--resume")
    assert read_lines(parts / "evals.jsonl") == evaluations
    assert models_of(parts) == models


def test_a_best_model_for_which_the_disk_has_no_room_is_a_warning(
    cli: ForkedCli, tmp_path: Path
) -> None:
    """Two ranks: both take part in the stream to its end."""
    words = ["train", QUICKSTART, *KEEPING, f"run.dir={tmp_path}"]
    environments = rank_environments(2)
    preludes = [f"import os\nos.environ.update({e!r})\n{FULL_FOR_BEST}" for e in environments]
    both = [cli.start(words, prelude) for prelude in preludes]
    first, other = (run.wait() for run in both)
    assert (first.exit_code, other.exit_code) == (0, 0), first.stderr
    assert "could not be written: File too large" in first.stderr
    assert "the best model is not kept, and the run continues" in first.stderr
    assert sorted(models_of(tmp_path)) == ["hf"]
