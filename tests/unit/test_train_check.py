"""`train --check`: the same checks as a start, and what the run would do; nothing is written."""

import json
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
    assert "1 x cpu: FITS" in rows["memory"]
    # Figures of so small a run are not rounded to nothing.
    assert " 0.0 " not in rows["memory"] and " seconds. Bottleneck: " in rows["memory"]
    assert "models 2.67 MB" in rows["disk"]
    lines = [json.loads(line) for line in train.read_text("utf-8").splitlines()]
    (answer,) = [line["answer"] for line in lines if line["problem"] in rows["prompt"]]
    assert rows["gold answer"].strip() == answer
    assert f"{run_dir} is new" in rows["run.dir"]
    assert "run.eval_every" in rows["free on resume"]
    assert "optimizer.lr" in rows["adjustable"]
    assert ended.stdout.count("\\boxed{}") == 1  # the prompt, as the model sees it
    assert not run_dir.exists()


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
