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
