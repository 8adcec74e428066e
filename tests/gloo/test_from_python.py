"""Data and judges that a script hands over: on one rank and on two, resumed, and evaluated."""

import json
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ForkedCli
from processes import rank_environments
from run_differences import read_lines
from small_run import QUICKSTART, SMALL_RUN

# The judge is a lambda that reads globals and sets, whose order is another in every process.
SCRIPT = """
import json, os
from pathlib import Path

os.environ.update({each!r})
from datasets import Dataset
from megatron_opsft import evaluate, load_config, train

DIR = Path({directory!r})
EVEN = {{"a", "b", "c", "d", "e"}}
rows = [{{"problem": f"What is {{a}}+{{b}}?", "answer": a + b}} for a in range(6) for b in range(4)]

def share(text):
    return sum(letter in EVEN for letter in text.lower()) / max(len(text), 1)

judge = lambda text, gold, fields: (share(text) > {threshold} or text in {{"x", "y", "z"}})

def config(steps):
    keys = {keys!r}
    return load_config({quickstart!r}, [*keys, f"run.dir={{DIR / 'run'}}", f"run.steps={{steps}}"])

{body}
raise SystemExit(0)
"""
TRAIN = "train(config(1), data=rows, judge=judge)\n"
RESUME = "train(config(2), data=Dataset.from_list(rows), judge=judge, resume=True)\n"
EVALUATE = """
results = evaluate(model="tiny_reasoner", out=DIR / "eval", data={"sums": rows}, judge=judge,
                   limit=4, samples=1, max_tokens=16, device="cpu")
if results:
    (DIR / "accuracy").write_text(str(results.overall.metrics["accuracy"].value))
"""
KEYS = [*SMALL_RUN, "eval.data=null", "eval.holdout=2", "checkpoint.every=1"]
KEYS += ["optimizer.schedule=constant"]


def run_script(
    cli: ForkedCli, directory: Path, body: str, world_size: int = 1, threshold: float = 0.15
) -> str:
    """Run it on every rank; return what all of them print."""
    given = {"keys": KEYS, "directory": str(directory), "quickstart": QUICKSTART}
    given |= {"body": body, "threshold": threshold}
    environments = rank_environments(world_size) if world_size > 1 else [{}]
    runs = [cli.start([], SCRIPT.format(each=each, **given)) for each in environments]
    printed = ""
    for run in runs:
        ended = run.wait(200)
        assert ended.exit_code == 0, ended.stderr
        printed += ended.stdout
    return printed


def identity_of(directory: Path) -> Any:
    return json.loads((directory / "manifest.json").read_text())["identity"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_script_s_data_and_lambda_are_trained_with_resumed_and_evaluated(
    cli: ForkedCli, tmp_path: Path, world_size: int
) -> None:
    run_script(cli, tmp_path, TRAIN + RESUME + EVALUATE, world_size)
    run = tmp_path / "run"
    (data,), (judge,) = run.glob("data_*"), run.glob("judge_*.py")
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert rows[5] == {"problem": "What is 1+1?", "answer": 2} and len(rows) == 24
    identity = identity_of(run)
    assert identity["judge"] == f"{judge.stem}:judge"
    steps = read_lines(run / "metrics.jsonl")
    # The lambda has judged, and not all alike.
    assert [0 < step["accuracy"] < 1 for step in steps] == [True, True]
    assert {path.name for path in (tmp_path / "eval").glob("[dj]*_*")} == {data.name, judge.name}
    assert identity_of(tmp_path / "eval")["verifier"] == identity["judge"]
    assert 0 <= float((tmp_path / "accuracy").read_text()) <= 1


def test_the_command_line_resumes_with_the_run_s_own_configuration(
    cli: ForkedCli, tmp_path: Path
) -> None:
    """And gives the numbers of the script; another judge, and other data, are refused."""
    run_script(cli, tmp_path, TRAIN)
    run, config = tmp_path / "run", tmp_path / "run/config.yaml"
    before = {path.name: path.read_bytes() for path in run.glob("[dj]*_*")}
    for call, threshold, said in (
        ("data=rows, judge=judge, resume=True", 0.2, "was started with verify.judge='judge_"),
        ("data=rows[1:], judge=judge, resume=True", 0.15, "the problems in "),
        ("data=rows[1:], judge=judge, resume=True", 0.15, ".jsonl); restore what it had"),
        ("data=rows[2:], judge=share", 0.15, "already holds a run; continue it with resume=True"),
    ):
        body = f"try:\n    train(config(2), {call})\nexcept Exception as error:\n    print(error)\n"
        assert said in run_script(cli, tmp_path, body, threshold=threshold)
    # The rows that a resumed run refused stay; a start that was refused has written nothing.
    assert [len(list(run.glob(names))) for names in ("data_*", "judge_*.py")] == [2, 2]
    for name, content in before.items():
        assert (run / name).read_bytes() == content
    ended = cli.run(["train", config, "--resume", "run.steps=2"])
    assert ended.exit_code == 0, ended.stderr
    by_command = read_lines(run / "metrics.jsonl")
    run_script(cli, tmp_path / "whole", TRAIN.replace("1", "2"))
    by_script = read_lines(tmp_path / "whole/run/metrics.jsonl")
    for key in ("loss", "grad_norm", "accuracy", "mean_response_tokens"):
        assert [step[key] for step in by_command] == [step[key] for step in by_script]
    judge = identity_of(run)["judge"]
    keys = [f"judge={judge}", "limit=1", "samples=1", "max_tokens=8", "device=cpu"]
    ended = cli.run(["eval", "--model", run, "--out", tmp_path / "eval", *keys])
    assert ended.exit_code == 0, ended.stderr
    assert identity_of(tmp_path / "eval")["verifier"] == judge
    run_script(cli, tmp_path, TRAIN.replace(")\n", ", overwrite=True)\n"))
    assert read_lines(run / "metrics.jsonl")[0]["loss"] == by_script[0]["loss"]


def test_ranks_with_different_data_or_judges_are_refused(cli: ForkedCli, tmp_path: Path) -> None:
    body = """
rank = int(os.environ["RANK"])
for data, decide in ((rows[rank:], judge), (rows, (judge, share)[rank])):
    try:
        train(config(1), data=data, judge=decide, overwrite=True)
    except Exception as error:
        print(error)
"""
    body += """
try:
    evaluate(model="tiny_reasoner", out=DIR / "eval", data=rows[rank:], limit=4, device="cpu")
except Exception as error:
    print(error)
"""
    said = "every rank must be given the same problems and judge"
    assert run_script(cli, tmp_path, body, 2).splitlines().count(said) == 6
