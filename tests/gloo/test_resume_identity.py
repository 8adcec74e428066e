"""What a resumed run may find elsewhere, what it may be given anew, and what must be the same."""

import json
import re
import shutil
from pathlib import Path

import pytest
from forked_cli import Finished, ForkedCli
from processes import rank_preludes
from run_differences import read_lines
from safetensors.torch import load_file, save_file
from small_run import QUICKSTART, SMALL_RUN

from megatron_opsft.models.storage.model_paths import resolve_model

SUMS = [{"problem": f"What is {a}+{b}?", "answer": str(a + b)} for a in range(6) for b in range(4)]
# With a reference model, so that the base model counts in every step.
KEYS = [*SMALL_RUN, "optimizer.schedule=constant", "checkpoint.every=1", "eval.data=null"]
KEYS += ["method.name=grpo", "method.beta=0.1", "eval.holdout=2"]


THEN = "are not those that this run was started with"


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
    said = (
        f"the weights in {model} are not those that this run was started with ({place / 'model'})"
    )
    assert f"run.dir={tmp_path / 'run'}: {said}; restore what it had, or name" in ended.error


def test_other_problems_are_refused(cli: ForkedCli, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    rows = [*SUMS[:-1], SUMS[-1] | {"answer": "12"}]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"run.dir={tmp_path / 'run'}", f"data.train={tmp_path / 'sums.jsonl'}"]
    ended = cli.run([*args(place, 2), *keys, "--resume"])
    new, old = tmp_path / "sums.jsonl", place / "sums.jsonl"
    said = f"the problems in {new} are not those that this run was started with ({old}); restore"
    assert said in ended.error


def start(cli: ForkedCli, words: list[str], ranks: int) -> Finished:
    """The end of rank 0."""
    runs = [cli.start(words, prelude) for prelude in rank_preludes(ranks)]
    ends = [run.wait() for run in runs]
    assert len({ended.exit_code for ended in ends}) == 1
    return ends[0]


@pytest.mark.parametrize(
    ("changed", "ranks", "said"),
    [
        ("data", 1, f"the problems in DATA {THEN} (DATA as it was then); restore what it had"),
        ("data", 2, f"the problems in DATA {THEN} (DATA as it was then); restore what it had"),
        ("model", 1, f"the weights in MODEL {THEN} (MODEL as it was then); restore what it had"),
        ("run.seed=1", 1, "was started with run.seed=0, not 1: a resumed run must keep it"),
    ],
)
def test_a_finished_run_compares_the_same(
    cli: ForkedCli, place: Path, tmp_path: Path, changed: str, ranks: int, said: str
) -> None:
    """With what it had, nothing is left; and nothing is written in either case."""
    shutil.copytree(place / "whole", tmp_path / "run")
    model = shutil.copytree(place / "model", tmp_path / "model")
    data = tmp_path / "sums.jsonl"
    shutil.copyfile(place / "sums.jsonl", data)
    config = tmp_path / "run/config.yaml"
    text = config.read_text().replace(str(place / "sums.jsonl"), str(data))
    config.write_text(text.replace(str(place / "model"), str(model)))
    words = [*args(tmp_path, 2), "--resume"]
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    ended = start(cli, words, ranks)
    assert ended.exit_code == 0, ended.stderr
    assert "the run is finished; nothing is left" in ended.stdout
    if changed == "data":
        data.write_text(data.read_text().replace('"answer": "8"', '"answer": "9"'))
    elif changed == "model":
        weights = load_file(model / "model.safetensors")
        weights[min(weights)] += 0.01
        save_file(weights, model / "model.safetensors", {"format": "pt"})
    else:
        words.append(changed)
    ended = start(cli, words, ranks)
    assert ended.exit_code == 2
    assert said.replace("DATA", str(data)).replace("MODEL", str(model)) in ended.stderr
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert after == before


def test_a_run_whose_held_out_problems_were_drawn_by_an_earlier_release_is_refused_in_words(
    cli: ForkedCli, place: Path, tmp_path: Path
) -> None:
    """That evaluated rows that repeat a held-out problem as well."""
    rows = [*SUMS, *SUMS]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"data.train={tmp_path / 'sums.jsonl'}"
    ended = cli.run([*args(place, 1), data, f"run.dir={tmp_path / 'run'}"])
    assert ended.exit_code == 0, ended.stderr
    assert "repeats " in ended.stderr
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["num_bad_rows"] == 2
    words = [*args(place, 2), data, f"run.dir={tmp_path / 'run'}", "--resume"]
    manifest["identity"]["held_out_sha256"]["eval"] = "of four rows"
    (tmp_path / "run/manifest.json").write_text(json.dumps(manifest))
    ended = cli.run(words)
    said = (
        "the held-out problems in .*jsonl \\(eval.holdout=2\\) are not those that this run was st"
    )
    assert re.search(f"{said}.*; earlier releases also evaluated a held-out problem's", ended.error)


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
