"""`eval` on the shipped model: results do not depend on the way, and mistakes are one line."""

import gzip
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ROOT, ForkedCli, Run
from processes import rank_environments
from rows import write_rows
from safetensors.torch import load_file, save_file

from megatron_opsft.commands.evaluate.inputs import open_model
from megatron_opsft.commands.evaluate.settings import EvaluationDirectory
from megatron_opsft.data.problems import load_problems
from megatron_opsft.data.stored_samples import SampleFiles
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.formatting import count_of

ASSET = ROOT / "megatron_opsft/assets/tiny_reasoner"
ROPE = {"rope_type": "default", "rope_theta": 123456.0}
SMALL = ["limit=6", "samples=4", "max_tokens=250", "device=cpu"]
NUM_SAMPLES = 24


# Whoever has its first samples waits until the other rank has some.
BOTH_WORK = """
import os, time
from pathlib import Path
from megatron_opsft.data.stored_samples import SampleFiles
append = SampleFiles.append
def append_and_wait(self, *args):
    append(self, *args)
    Path({place!r}, os.environ["RANK"]).touch()
    deadline = time.monotonic() + 60
    while len(os.listdir({place!r})) < 2:
        assert time.monotonic() < deadline, "the other rank has made no sample"
        time.sleep(0.01)
SampleFiles.append = append_and_wait
"""


def start(cli: ForkedCli, out: Path, *more: object, prelude: str = "", **environment: str) -> Run:
    prelude = f"import os; os.environ.update({environment!r})\n{prelude}"
    return cli.start(["eval", "--model", "tiny_reasoner", "--out", out, *SMALL, *more], prelude)


def results_of(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "results.json").read_text()))


def evaluate(cli: ForkedCli, out: Path, *more: object) -> str:
    """What it says."""
    ended = start(cli, out, *more).wait()
    assert ended.exit_code == 0, ended.stderr
    return ended.stderr


def outputs(out: Path) -> dict[str, bytes]:
    """Whatever must not depend on how it came about."""
    names = ["results.json", "table.md", "samples/arithmetic.jsonl.gz"]
    return {name: (out / name).read_bytes() for name in names}


def rows_of(out: Path) -> list[dict[str, Any]]:
    text = gzip.decompress((out / "samples/arithmetic.jsonl.gz").read_bytes())
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def whole(cli: ForkedCli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation that nothing disturbed."""
    out = tmp_path_factory.mktemp("eval") / "whole"
    evaluate(cli, out)
    return out


def test_every_output_is_there_and_results_follow_from_the_stored_samples(whole: Path) -> None:
    there = {str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()}
    assert there == {"manifest.json", "problems.jsonl", "report.html", *outputs(whole)}
    problems = load_problems("arithmetic", split="test").problems[:6]
    texts = {("arithmetic", problem.id): problem.text for problem in problems}
    assert SampleFiles(whole).problems() == texts
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["example_prompt"].endswith("<think>\n")
    rows = rows_of(whole)
    assert len(rows) == NUM_SAMPLES
    metrics = results_of(whole)["overall"]["metrics"]
    correct = sum(row["outcome"] == "correct" for row in rows) / NUM_SAMPLES
    tokens = sum(row["num_tokens"] for row in rows) / NUM_SAMPLES
    assert metrics["accuracy"]["value"] == pytest.approx(correct)
    assert metrics["mean_tokens"]["value"] == pytest.approx(tokens)
    assert correct > 0.9 and 80 < tokens < 160
    assert all(row["text"].count("\\boxed") == 1 for row in rows if row["outcome"] == "correct")


def test_two_ranks_work_and_change_nothing(cli: ForkedCli, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    place = tmp_path / "have_samples"
    place.mkdir()
    work = BOTH_WORK.format(place=str(place))
    ranks = [start(cli, out, "batch_size=4", prelude=work, **each) for each in rank_environments(2)]
    for rank in ranks:
        assert rank.wait().exit_code == 0, rank.stderr
    assert outputs(out) == outputs(whole)


def num_stored(out: Path) -> int:
    """Samples on disk, in whichever files."""
    if (out / "samples/arithmetic.jsonl.gz").exists():
        return NUM_SAMPLES
    return sum(path.read_bytes().count(b"\n") for path in (out / "samples/parts").glob("*"))


def test_kills_at_any_moment_change_nothing(cli: ForkedCli, whole: Path, tmp_path: Path) -> None:
    moments, out = random.Random(0), tmp_path / "out"
    for _ in range(2):
        wanted = min(num_stored(out) + moments.randint(0, 6), NUM_SAMPLES)
        run = start(cli, out, "batch_size=4")
        while num_stored(out) < wanted:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.3))
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    left = NUM_SAMPLES - num_stored(out)
    said = evaluate(cli, out, "batch_size=4")
    assert left < NUM_SAMPLES and outputs(out) == outputs(whole)
    assert not left or f"tiny_reasoner: {count_of([left], 'sample')} missing" in said


def test_more_samples_keep_what_is_there(cli: ForkedCli, whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    said = evaluate(cli, out, "samples=5", "limit=7")
    assert f"{35 - NUM_SAMPLES} samples missing" in said
    assert results_of(out)["benchmarks"]["arithmetic"]["samples_per_problem"] == 5
    # The results of fewer are of those alone, and nothing is sampled.
    assert "are missing" not in evaluate(cli, out)
    assert (out / "results.json").read_bytes() == (whole / "results.json").read_bytes()


def test_what_differs_from_a_baseline_is_named(cli: ForkedCli, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    evaluate(cli, out, "--baseline", whole, "template=cod", "--name", "draft")
    results, base = results_of(out), results_of(whole)
    tokens = [r["overall"]["metrics"]["mean_tokens"]["value"] for r in (results, base)]
    ratio = results["overall"]["metrics"]["compression_ratio"]
    assert ratio["value"] == pytest.approx(tokens[0] / tokens[1])
    assert results["baseline"] == "tiny_reasoner"
    differs = 'differs: template: "r1" (tiny_reasoner); "cod" (draft)'
    assert differs in (out / "table.md").read_text()
    page = tmp_path / "page.html"
    for words in ([out], [whole, out]):  # one alone stands behind its baseline
        ended = cli.run(["report", *words, "--html", page, "--overwrite"])
        assert ended.exit_code == 0 and differs in ended.stdout
    assert "Accuracy against mean response tokens" in page.read_text()


def test_a_baseline_beside_the_model_and_local_files(cli: ForkedCli, tmp_path: Path) -> None:
    problems = load_problems("arithmetic", split="test").problems[:4]
    mine = [{"question": p.text, "answer": p.answer} for p in problems]
    write_rows(tmp_path / "mine.jsonl", mine)
    write_rows(tmp_path / "gsm8k.jsonl", [row | {"answer": "-1"} for row in mine])
    config, out = tmp_path / "eval.yaml", tmp_path / "out"
    config.write_text(
        f"model: tiny_reasoner\nname: it\nout: {tmp_path / 'wrong'}\nbaseline: {ASSET}\n"
        f"data: {{mine: {tmp_path / 'mine.jsonl'}, gsm8k: {tmp_path / 'gsm8k.jsonl'}}}\n"
        "samples: 2\nmax_tokens: 250\nbudgets: [50, 250]\n"
    )
    ended = cli.run(["eval", config, "--out", out])
    assert ended.exit_code == 0, ended.stderr
    assert not (tmp_path / "wrong").exists()
    results = results_of(out)
    accuracy = {n: b["metrics"]["accuracy"]["value"] for n, b in results["benchmarks"].items()}
    assert accuracy["gsm8k"] == 0.0 and accuracy["mine"] > 0.7
    overall = results["overall"]
    assert overall["metrics"]["accuracy"]["value"] == pytest.approx(accuracy["mine"] / 2)
    assert [point["budget"] for point in overall["budgets"]] == [50, 250]
    assert overall["differences"]["mean_tokens"]["value"] == 0.0  # the same model
    assert results_of(out / "baseline")["model"] == "tiny_reasoner"


def test_early_exit_is_shorter_and_has_costs(cli: ForkedCli, whole: Path, tmp_path: Path) -> None:
    config = tmp_path / "deer.yaml"
    words = "transition_words: [Wait, Alternatively, Hmm]"
    texts = r'trial_prompt: "</think>\n\\boxed", exit_text: "</think>\n"'
    config.write_text(f"method: deer\ndeer: {{{words}, {texts}}}\n")
    outs = [tmp_path / "one", tmp_path / "other"]
    for out, batch_size in zip(outs, (64, 7), strict=True):
        evaluate(cli, out, config, f"batch_size={batch_size}")
    assert outputs(outs[0]) == outputs(outs[1])
    plain, early = rows_of(whole), rows_of(outs[0])
    assert sum(row["outcome"] == "correct" for row in early) >= 0.9 * NUM_SAMPLES
    assert sum(r["num_tokens"] for r in early) < 0.8 * sum(r["num_tokens"] for r in plain)
    assert sum(r["extra_tokens"] for r in early) > 0 == sum(r["extra_tokens"] for r in plain)
    settings = results_of(outs[0])["settings"]
    assert settings["method"] == "deer" and settings["deer"]["threshold"] == 0.95


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--benchmarks", "gsm9k"], "'gsm9k' is unknown"),
        (["--data", "mine=/nowhere.jsonl"], "/nowhere.jsonl"),
        (["max_tokens=2000"], "set max_tokens="),
        (["--budgets", "100,251"], "budgets=251: must be"),
        (["tp=2"], "error: tp=2 works only with vLLM; set engine=vllm or tp=1"),
        (["--baseline", "/nowhere"], "--baseline=/nowhere is not a directory"),
        (["template=none.jinja"], "error: template=none.jinja cannot be read"),
        (["method=deer", "deer.transition_words=Notaword"], "'Notaword' is not a single token"),
        (["method=deer", "budgets=100"], "budgets: early exit tries answers"),
        (["--max-token", "8"], "unknown config key max_token; did you mean max_tokens"),
    ],
)
def test_bad_options_are_one_line_before_anything_is_sampled(
    cli: ForkedCli, tmp_path: Path, options: list[str], words: str
) -> None:
    assert words in start(cli, tmp_path / "out", *options).wait().error
    assert not (tmp_path / "out/samples").exists()


def test_another_evaluation_is_not_mixed_in(cli: ForkedCli, whole: Path, tmp_path: Path) -> None:
    before = outputs(whole)
    line = start(cli, whole, "temperature=0.7").wait().error
    assert "temperature=0.6, not 0.7" in line and "--overwrite" in line
    assert outputs(whole) == before
    (tmp_path / "manifest.json").write_text('{"model": "a training run"}')
    assert "something other than an evaluation" in start(cli, tmp_path, "--overwrite").wait().error
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    (out / "notes.txt").write_text("mine")
    evaluate(cli, out, "seed=1", "--overwrite", "limit=2")
    assert results_of(out)["settings"]["seed"] == 1
    assert (out / "notes.txt").read_text() == "mine"


def enter(directory: Path, identity: dict[str, Any], *, overwrite: bool = False) -> None:
    """As each start of an evaluation does."""
    EvaluationDirectory(directory).begin({"identity": identity}, overwrite=overwrite)


def test_overwrite_removes_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    out, kept = tmp_path / "out", tmp_path / "scratch/kept"
    for directory in (out, kept.parent):
        directory.mkdir()
    kept.touch()
    enter(out, {"data": {"mini": "d1"}})
    (out / "samples").symlink_to(kept.parent)
    (out / "table.md").symlink_to(tmp_path / "gone")
    enter(out, {"data": {"mini": "d2"}}, overwrite=True)
    assert [path.name for path in out.iterdir()] == ["manifest.json"] and kept.exists()


def edited_model(path: Path, file: str, **changes: object) -> dict[str, Any]:
    """The identity of the shipped model with another value in one of its JSON files, at `path`."""
    shutil.copytree(ASSET, path)
    (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | changes))
    return open_model(str(path)).identity() | {"data": {}}


def test_a_baseline_that_the_engine_cannot_hold_is_refused(cli: ForkedCli, tmp_path: Path) -> None:
    edited_model(tmp_path / "model", "config.json", rope_parameters=ROPE)
    line = start(cli, tmp_path / "out", "--baseline", tmp_path / "model").wait().error
    assert "is of another architecture, size or rotary scaling (config.json) than the model" in line
    assert not (tmp_path / "out/samples").exists()


def test_a_model_read_otherwise_is_another_model(tmp_path: Path) -> None:
    """Rotary base and end tokens decide samples, and no weight shows them."""
    same = edited_model(tmp_path / "same", "config.json")
    for _ in range(2):
        enter(tmp_path, same)
    SampleFiles(tmp_path).append("arithmetic", [])  # without samples it may become another one
    (ended, *_) = same["end_tokens"]
    for file, change, words in (
        ("config.json", {"rope_parameters": ROPE}, r"shape\.rope_theta=.*, not 123456\.0"),
        ("generation_config.json", {"eos_token_id": [ended, ended + 1]}, "end_tokens="),
    ):
        other = edited_model(tmp_path / words[:3], file, **change)
        with pytest.raises(UserError, match=words):
            enter(tmp_path, other)


def test_a_baseline_on_other_problems_is_refused(cli: ForkedCli, tmp_path: Path) -> None:
    """By hash and number of problems, and by what is missing; samples in `out` by the hash."""
    first, second = (
        write_rows(tmp_path / f"{n}.jsonl", [{"problem": f"{n} + 1?", "answer": a} for a in "12"])
        for n in range(2)
    )
    base, out = tmp_path / "base", tmp_path / "out"
    small = ["limit=2", "samples=1", "max_tokens=40"]

    def refusal(data: str, *more: str) -> str:
        given = [f"data.mini={data}", "--baseline", base, *small, *more]
        line = start(cli, out, *given).wait().error
        assert f"--baseline {base}: " in line
        assert not (out / "samples").exists()
        return line

    evaluate(cli, base, f"data.mini={first}", *small)
    said = start(cli, base, f"data.mini={second}", *small).wait().error
    then = f"that this evaluation was started with ({first}); set it back"
    assert f"the problems in {second} are not those {then}" in said
    model = tmp_path / "model"
    edited_model(model, "config.json")
    weights = load_file(model / "model.safetensors")
    weights[min(weights)] += 0.01
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    said = start(cli, base, f"data.mini={first}", *small, f"model={model}").wait().error
    then = "that this evaluation was started with (tiny_reasoner); set it back"
    assert f"the weights in {model} are not those {then}" in said
    assert "its samples of mini are not of the 2 problems of" in refusal(second)
    assert "its samples of mini are not of the 1 problems of" in refusal(first, "limit=1")
    lines = gzip.decompress((base / "samples/mini.jsonl.gz").read_bytes()).splitlines(True)
    (base / "samples/mini.jsonl.gz").write_bytes(gzip.compress(lines[0]))
    assert "are incomplete: 1 are missing" in refusal(first)
