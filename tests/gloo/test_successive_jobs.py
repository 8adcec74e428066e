"""Scripts that train, evaluate and train again in one process, after errors and after success."""

import json
from pathlib import Path

from forked_cli import ForkedCli
from processes import rank_environments
from small_run import QUICKSTART, SMALL_RUN

# `attempt` notes what a call raised. The first run fails in its second step.
SCRIPT = """
import json, os, threading
from pathlib import Path

os.environ.update({each!r})
from megatron_opsft import evaluate, load_config, train
from megatron_opsft.trainer.model.step import Trainer
from megatron_opsft.runtime.job import Job

KEYS, DIR = {keys!r}, Path({directory!r})
RANK = int(os.environ.get("RANK", "0"))
noted = []

def attempt(act, *args, **kwargs):
    before = threading.active_count()
    try:
        done = act(*args, **kwargs)
        noted.append(type(done).__name__)
    except Exception as error:
        noted.append(f"{{type(error).__name__}}: {{error}}")
    names = {{t.name for t in threading.enumerate()}}
    if "watchdog" in names or any("scorer" in n or "ThreadPool" in n for n in names):
        noted.append(sorted(names))

def config(name, *more):
    return load_config({quickstart!r}, [*KEYS, f"run.dir={{DIR / name}}", *more])

step = Trainer.step
calls = []
def failing_step(self, *args):
    calls.append(1)
    if len(calls) == 2:
        raise ValueError("a fault of a library")
    return step(self, *args)

def evaluation(name):
    return evaluate(model="tiny_reasoner", out=DIR / name, limit=4, samples=1, max_tokens=16,
                    device="cpu")

Trainer.step = failing_step
attempt(train, config("first"))
Trainer.step = step
attempt(train, config("first", "data.train=nowhere.jsonl"), overwrite=True)
attempt(train, config("first"), overwrite=True)
attempt(evaluation, "evaluation")
attempt(evaluate, model="tiny_reasoner", out=DIR / "bad", data={{"a": "nowhere.jsonl"}})
attempt(train, config("second"))
(DIR / f"noted{{RANK}}.json").write_text(json.dumps(noted))
raise SystemExit(0)
"""


def notes_of(
    cli: ForkedCli, directory: Path, environments: list[dict[str, str]]
) -> list[list[str]]:
    """What each rank of the script noted."""
    keys = [*SMALL_RUN, "run.steps=2", "run.silence_seconds=10"]
    given = {"keys": keys, "directory": str(directory), "quickstart": QUICKSTART}
    runs = [cli.start([], SCRIPT.format(each=each, **given)) for each in environments]
    for run in runs:
        ended = run.wait(200)
        assert ended.exit_code == 0, ended.stderr
    return [
        json.loads((directory / f"noted{rank}.json").read_text())
        for rank in range(len(environments))
    ]


def check_rest(notes: list[str], evaluated: str) -> None:
    unknown, trained, evaluation, no_data, again = notes
    assert "nowhere.jsonl" in unknown and "nowhere.jsonl" in no_data
    assert (trained, evaluation, again) == ("TrainedRun", evaluated, "TrainedRun")


def test_one_process_trains_and_evaluates_again_after_errors(
    cli: ForkedCli, tmp_path: Path
) -> None:
    (notes,) = notes_of(cli, tmp_path, [{}])
    assert notes[0] == "ValueError: a fault of a library"
    check_rest(notes[1:], "Results")
    runs = [(tmp_path / name / "hf/model.safetensors").read_bytes() for name in ("first", "second")]
    assert runs[0] == runs[1]


def test_two_ranks_train_and_evaluate_again_after_errors(cli: ForkedCli, tmp_path: Path) -> None:
    """The second error is one of rank 0 alone, before the ranks have met."""
    first, second = notes_of(cli, tmp_path, rank_environments(2))
    assert first[0] == second[0] == "ValueError: a fault of a library"
    check_rest(first[1:], "Results")
    check_rest(second[1:], "NoneType")
