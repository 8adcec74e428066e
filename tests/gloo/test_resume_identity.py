"""What a resumed run may find elsewhere, what it may be given anew, and what must be the same."""

import json
import shutil
from pathlib import Path

import pytest
from forked_cli import ForkedCli
from run_differences import read_lines
from safetensors.torch import load_file, save_file
from small_run import QUICKSTART, SMALL_RUN

from megatron_opsft.models.storage.model_paths import resolve_model

SUMS = [{"problem": f"What is {a}+{b}?", "answer": str(a + b)} for a in range(6) for b in range(4)]
# With a reference model, so that the base model counts in every step.
KEYS = [*SMALL_RUN, "optimizer.schedule=constant", "checkpoint.every=1", "eval.data=null"]
KEYS += ["method.name=grpo", "method.beta=0.1", "eval.holdout=2"]


def args(place: Path, steps: int, run: str = "run") -> list[str]:
    paths = [f"run.dir={place / run}", f"model.path={place / 'model'}"]
    paths += [f"data.train={place / 'sums.jsonl'}"]
    return ["train", QUICKSTART, *KEYS, *paths, f"run.steps={steps}"]


@pytest.fixture(scope="module")
def place(cli: ForkedCli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data, `whole` of two steps, and `run`, whose first step is done."""
    place = tmp_path_factory.mktemp("place")
    shutil.copytree(resolve_model("tiny_reasoner"), place / "model")
    (place / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    for steps, run in ((2, "whole"), (1, "run")):
        ended = cli.run(args(place, steps, run))
        assert ended.exit_code == 0, ended.stderr
    return place


def test_model_and_data_may_move_and_the_numbers_stay(
    cli: ForkedCli, place: Path, tmp_path: Path
) -> None:
    """The files have other names and times; so the seeds of responses come from neither."""
    shutil.copytree(place / "run", tmp_path / "run")
    shutil.copytree(place / "model", tmp_path / "elsewhere", copy_function=shutil.copyfile)
    shutil.copyfile(place / "sums.jsonl", tmp_path / "others.jsonl")
    moved = [f"model.path={tmp_path / 'elsewhere'}", f"data.train={tmp_path / 'others.jsonl'}"]
    ended = cli.run([*args(place, 2), f"run.dir={tmp_path / 'run'}", *moved, "--resume"])
    assert ended.exit_code == 0, ended.stderr
    whole, found = (
        read_lines(at / "metrics.jsonl")[1] for at in (place / "whole", tmp_path / "run")
    )
    for key in ("loss", "kl_mean", "grad_norm", "accuracy", "mean_response_tokens"):
        assert found[key] == whole[key]
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["adjusted"] == []


def test_other_base_weights_are_refused(cli: ForkedCli, place: Path, tmp_path: Path) -> None:
    """They would be another reference model."""
    shutil.copytree(place / "run", tmp_path / "run")
    model = shutil.copytree(place / "model", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    name = min(weights)
    weights[name] = weights[name] + 0.01
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    keys = [f"run.dir={tmp_path / 'run'}", f"model.path={model}"]
    ended = cli.run([*args(place, 2), *keys, "--resume"])
    assert ended.exit_code == 2
    assert "holds a run with model.weights_sha256=" in ended.error


def test_other_problems_are_refused(cli: ForkedCli, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    rows = [*SUMS[:-1], SUMS[-1] | {"answer": "12"}]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"run.dir={tmp_path / 'run'}", f"data.train={tmp_path / 'sums.jsonl'}"]
    ended = cli.run([*args(place, 2), *keys, "--resume"])
    assert ended.exit_code == 2 and "sha256=" in ended.error


def test_what_a_remedy_names_is_taken_said_and_written_down(
    cli: ForkedCli, place: Path, tmp_path: Path
) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    keys = ["verify.timeout_seconds=20", "rollout.batch_size=7", "rollout.gpu_memory_fraction=0.3"]
    ended = cli.run([*args(place, 2), f"run.dir={tmp_path / 'run'}", *keys, "--resume"])
    assert ended.exit_code == 0, ended.stderr
    said = "WARNING verify.timeout_seconds=20.0 from step 2 on; until now it was 10.0"
    assert said in ended.stderr and "batch_size" not in ended.stderr
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    change = {"key": "verify.timeout_seconds", "before": 10.0, "now": 20.0, "after_step": 1}
    assert manifest["adjusted"] == [change]


def test_other_versions_of_libraries_are_said(cli: ForkedCli, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    file = tmp_path / "run/manifest.json"
    manifest = json.loads(file.read_text())
    now, manifest["versions"]["torch"] = manifest["versions"]["torch"], "2.0.0"
    file.write_text(json.dumps(manifest))
    ended = cli.run([*args(place, 2), f"run.dir={tmp_path / 'run'}", "--resume"])
    assert ended.exit_code == 0, ended.stderr
    assert f"WARNING torch={now} from step 2 on; until now it was 2.0.0" in ended.stderr
    assert json.loads(file.read_text())["adjusted"][0]["key"] == "torch"
