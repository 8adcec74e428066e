"""An evaluation says which of its problems the model's run was trained on."""

import csv
import gzip
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from forked_cli import ForkedCli
from rows import problem_set
from small_run import QUICKSTART, SMALL_RUN

from megatron_opsft.commands.evaluate.benchmarks import Benchmark
from megatron_opsft.commands.evaluate.trained_on import notes_on_training
from megatron_opsft.config.load import load_config, to_yaml
from megatron_opsft.data.problems import load_problems
from megatron_opsft.records import Problem

SUMS = [(f"What is {a}+{b}?", str(a + b)) for a in range(5) for b in range(4)]
SMALL = ["samples=1", "max_tokens=16", "device=cpu", "batch_size=20"]


def write_table(path: Path, rows: list[tuple[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("problem", "answer"), *rows])
    return path


@pytest.fixture(scope="module")
def place(cli: ForkedCli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`: of the 22 rows of mine.csv one is bad, one repeats another, 5 problems are held out,
    and two are in eval.more.
    """
    place = tmp_path_factory.mktemp("place")
    write_table(place / "mine.csv", [*SUMS, SUMS[0], ("What is 9+9?", "")])
    write_table(place / "more.csv", SUMS[-2:])
    keys = [f"data.train={place / 'mine.csv'}", "eval.data=null", "eval.holdout=5", "run.steps=1"]
    keys += [f"eval.more={{m: {place / 'more.csv'}}}", f"run.dir={place / 'run'}"]
    keys += ["eval.export_best=true", "verify.judge=math"]
    ended = cli.run(["train", QUICKSTART, *SMALL_RUN, *keys])
    assert ended.exit_code == 0, ended.stderr
    return place


def notes_of(model: Path, file: Path) -> tuple[str, ...]:
    data = load_problems(str(file))
    benchmark = Benchmark(name="mine", data=data, problems=data.problems, samples=1)
    settings = SimpleNamespace(model=str(model))
    return notes_on_training(cast(Any, SimpleNamespace(settings=settings, benchmarks=[benchmark])))


def test_what_was_trained_on_is_said_and_what_was_held_out_is_not(
    cli: ForkedCli, place: Path
) -> None:
    """On the console, in results.json, in the table and on the page; a new problem has no note."""
    whole = write_table(place / "whole.csv", [*SUMS, ("What is 7+8?", "15")])
    manifest = json.loads((place / "run/manifest.json").read_text())
    num_trained = manifest["num_problems"]
    left_out = [json.loads(row) for row in (place / "run/bad_rows.jsonl").read_text().splitlines()]
    repeats = sum("repeats" in row["reason"] for row in left_out)
    trained_texts = num_trained - (1 - repeats)  # row 21 asks what row 1 asks
    held_out_of_more = sum("also in" in row["reason"] for row in left_out)
    assert trained_texts + 5 + held_out_of_more == len(SUMS)
    note = f"{trained_texts} of 21 problems of mine are among those that {place / 'run'} was"
    note += " trained on, so its accuracy says nothing about new problems"
    for model in (place / "run", place / "run/hf"):
        out = place / f"eval_{model.name}"
        words = ["eval", "--model", model, "--data", f"mine={whole}", "--out", out, *SMALL]
        ended = cli.run(words)
        assert ended.exit_code == 0, ended.stderr
        assert f"WARNING {note}" in ended.stderr and note in ended.stdout
        assert json.loads((out / "results.json").read_text())["notes"] == [note]
        assert note in (out / "table.md").read_text()
        assert note in (out / "report.html").read_text()
    new = write_table(place / "new.csv", [("What is 7+8?", "15"), ("What is 8+8?", "16")])
    out = place / "eval_new"
    words = ["eval", "--model", place / "run", "--data", f"new={new}", "--out", out, *SMALL]
    ended = cli.run(words)
    assert ended.exit_code == 0 and "trained on" not in ended.stderr
    assert "notes" not in json.loads((out / "results.json").read_text())


def test_each_problem_is_trained_on_held_out_or_evaluated_elsewhere(place: Path) -> None:
    """One problem at a time: 13 to 15 of the 20, as the set of eval.more may be held out anyway."""
    held_out = set()
    for file in (place / "run/held_out").glob("*.jsonl.gz"):
        with gzip.open(file, "rt") as lines:
            held_out |= {json.loads(line)["problem"] for line in lines}
    assert len(held_out) == 4  # eval.num_problems
    num_noted = 0
    for number, row in enumerate(SUMS):
        notes = notes_of(place / "run", write_table(place / f"alone_{number}.csv", [row]))
        num_noted += len(notes)
        if row[0] in held_out or row in SUMS[-2:]:
            assert notes == ()
        elif notes:
            assert notes[0].startswith("1 of 1 problems of mine are among")
    (note,) = notes_of(place / "run", write_table(place / "all.csv", SUMS))
    assert note.startswith(f"{num_noted} of 20 problems of mine") and 13 <= num_noted <= 15


def test_the_data_of_the_run_that_a_run_started_from_count_too(place: Path, tmp_path: Path) -> None:
    later = shutil.copytree(place / "run", tmp_path / "later")
    other = write_table(tmp_path / "other.csv", [("What is 7+8?", "15")])
    config = load_config(later / "config.yaml")
    model = config.model.model_copy(update={"path": str(place / "run")})
    data = config.data.model_copy(update={"train": str(other)})
    evaluation = config.eval.model_copy(update={"holdout": 0, "more": ()})
    changed = config.model_copy(update={"model": model, "data": data, "eval": evaluation})
    (later / "config.yaml").write_text(to_yaml(changed))
    (later / "bad_rows.jsonl").unlink()
    manifest = json.loads((later / "manifest.json").read_text())
    manifest["identity"]["data_sha256"] = load_problems(str(other)).sha256
    (later / "manifest.json").write_text(json.dumps(manifest))
    whole = write_table(tmp_path / "whole.csv", [*SUMS, ("What is 7+8?", "15")])
    of_later, of_run = notes_of(later / "checkpoints/step_000001", whole)
    assert of_later.startswith(f"1 of 21 problems of mine are among those that {later} was trained")
    assert f"those that {place / 'run'} was trained" in of_run


@pytest.mark.parametrize("change", ["gone", "changed", "no run", "hub"])
def test_without_the_run_or_its_data_nothing_is_claimed(
    place: Path, tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = shutil.copytree(place / "run", tmp_path / "run")
    config, own = run / "config.yaml", write_table(tmp_path / "own.csv", [*SUMS, ("p", "1")])
    text = config.read_text()
    if change == "gone":
        config.write_text(text.replace(str(place / "mine.csv"), "gone.csv"))
    elif change == "changed":
        config.write_text(text.replace(str(place / "mine.csv"), str(own)))
    elif change == "hub":
        config.write_text(text.replace(str(place / "mine.csv"), "nobody/nothing"))
    else:
        (run / "manifest.json").unlink()
    assert notes_of(run, own) == ()
    said = {
        "gone": "there is no file gone.csv",
        "changed": "own.csv have changed since it was started",
        "hub": "nobody/nothing is not here",
        "no run": "",
    }[change]
    assert said in caplog.text
    assert ("is unknown" in caplog.text) == bool(said)


def test_texts_are_compared_as_training_leaves_out_what_is_evaluated(place: Path) -> None:
    """Without differences in white space."""
    spaced = [(f"  {text.replace(' ', chr(10))} ", answer) for text, answer in SUMS]
    problems = (Problem(id=str(n), text=t, answer=a) for n, (t, a) in enumerate(spaced))
    data = problem_set("spaced", problems)
    benchmark = Benchmark(name="spaced", data=data, problems=data.problems, samples=1)
    settings = SimpleNamespace(model=str(place / "run"))
    inputs = cast(Any, SimpleNamespace(settings=settings, benchmarks=[benchmark]))
    plain = notes_of(place / "run", write_table(place / "plain.csv", SUMS))
    assert [note.split()[0] for note in notes_on_training(inputs)] == [plain[0].split()[0]]
