"""`train --check`: the same checks as a start, and what the run would do; nothing is written."""

import json
import re
from pathlib import Path

from forked_cli import ROOT, ForkedCli
from small_run import QUICKSTART, SMALL_RUN

WORDS = ["train", QUICKSTART, "--check"]


def test_a_run_is_described_and_nothing_is_written(cli: ForkedCli, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ended = cli.run([*WORDS, *SMALL_RUN, f"run.dir={run_dir}", "verify.judge=math"])
    assert ended.exit_code == 0, ended.stderr
    rows = dict(line.split("  ", 1) for line in ended.stdout.splitlines() if line[0] != " ")
    assert rows["model"].strip().startswith("tiny_reasoner: Qwen2ForCausalLM, 4 layers")
    train = ROOT / "tests/data/train.jsonl"
    num_problems = len(train.read_text("utf-8").splitlines())
    assert f"{train}: {num_problems} problems to train on, 4 held out" in rows["data"]
    assert "on_policy_sft: A = 1[correct and n <= L]" in rows["method"]
    assert "24 responses of up to 64 tokens" in rows["method"]
    # Figures of so small a run are not rounded to nothing.
    fits = r" *1 x cpu: FITS, with [\d.]+ GB \(\d+%\) to spare\. \d+ steps take [\d.]+ (\w+)\."
    assert re.fullmatch(fits, rows["memory"]) and " 0.0 " not in rows["memory"]
    assert "models 2.67 MB" in rows["disk"]
    lines = [json.loads(line) for line in train.read_text("utf-8").splitlines()]
    (answer,) = [line["answer"] for line in lines if line["problem"] in rows["prompt"]]
    assert rows["gold answer"].strip() == answer
    takes = "math takes the first problem's own answer as right: yes"
    assert rows["judge"].strip() == takes
    assert f"{run_dir} is new" in rows["run.dir"] and "on resume" not in rows
    assert ended.stdout.count("\\boxed{}") == 1  # the prompt, as the model sees it
    assert not run_dir.exists()


def test_the_judge_is_tried_on_the_first_answer(cli: ForkedCli, tmp_path: Path) -> None:
    """What it says of that is said; one that gives no verdict is refused."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import os, time\n"
        "def no(text, gold, fields): return text != rf'\\boxed{{{gold}}}'\n"
        "def nothing(text, gold, fields): return None\n"
        "def exits(text, gold, fields): os._exit(3)\n"
        "def slow(text, gold, fields): time.sleep(9)\n"
    )
    words = [*WORDS, *SMALL_RUN, f"run.dir={tmp_path / 'run'}", "verify.timeout_seconds=0.5"]
    said = cli.run([*words, f"verify.judge={file}:no"])
    assert said.exit_code == 0
    assert f"{file}:no takes the first problem's own answer as right: no (wrong)" in said.stdout
    for name, why in {
        "nothing": "TypeError: it returned NoneType, not a bool",
        "exits": "its process ended with exit code 3",
        "slow": "it took longer than verify.timeout_seconds=0.5; raise that",
    }.items():
        error = cli.run([*words, f"verify.judge={file}:{name}"]).error
        assert f"judge {file}:{name}: it cannot judge \\boxed{{" in error and why in error


def test_a_run_that_is_there_says_what_may_change(cli: ForkedCli, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"kind": "run"}')
    said = cli.run([*WORDS, *SMALL_RUN, f"run.dir={tmp_path}", "--resume=auto"])
    assert said.exit_code == 0, said.stderr
    (line,) = [line for line in said.stdout.splitlines() if line.startswith("on resume")]
    assert "optimizer.lr" in line and "run.eval_every" not in line


def test_a_method_that_measures_the_thinking_says_so(cli: ForkedCli, tmp_path: Path) -> None:
    keys = ["method.name=hmpo", "method.length_of=thinking", f"run.dir={tmp_path / 'run'}"]
    ended = cli.run([*WORDS, *SMALL_RUN, *keys])
    assert ended.exit_code == 0, ended.stderr
    assert "median of correct n, lengths of the thinking; " in " ".join(ended.stdout.split())


def test_a_run_that_cannot_start_is_refused_as_by_train(cli: ForkedCli, tmp_path: Path) -> None:
    words = [*SMALL_RUN, f"run.dir={tmp_path / 'run'}"]
    for wrong in ("parallel.tp=3", "data.train=none.jsonl", "rollout.max_response_tokens=99999"):
        checked = cli.run([*WORDS, *words, wrong]).error
        assert checked == cli.run(["train", QUICKSTART, *words, wrong]).error


def test_rows_that_repeat_a_held_out_problem_are_counted(cli: ForkedCli, tmp_path: Path) -> None:
    """Of 12 rows 2 are trained on, 7 held out, and 3 repeat: each of them is counted."""
    rows = [*(f"What is {n}+1?,{n + 1}" for n in range(9)), *["What is 0+1?,1"] * 3]
    (tmp_path / "d.csv").write_text("\n".join(["problem,answer", *rows]))
    keys = [f"data.train={tmp_path / 'd.csv'}", "eval.data=null", "eval.num_problems=20"]
    keys += [f"run.dir={tmp_path / 'run'}"]
    said = []
    for seed in range(12):
        words = ["eval.holdout=7", f"run.seed={seed}"]
        ended = cli.run([*WORDS, *SMALL_RUN, *keys, *words])
        assert ended.exit_code == 0, ended.stderr
        said.append(next(line for line in ended.stdout.splitlines() if line.startswith("data ")))
        if "repeat" in said[-1]:
            break
    counts = "2 problems to train on, 7 held out, 3 rows left out (3 rows repeat another problem)"
    assert said[-1].endswith(counts)
    assert "d.csv, row 10: repeats " in ended.stdout
