"""`launch local`: a rank that dies is started again, a stop is passed on, the numbers stay."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from forked_cli import ForkedCli
from small_run import QUICKSTART, SMALL_RUN

from megatron_opsft.report.differences import compare_runs

SMALL = [QUICKSTART, *SMALL_RUN, "run.steps=4", "checkpoint.every=1"]


def wait_until(condition: Callable[[], bool], timeout: float = 100) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_rank_and_sigterm_leave_no_trace_in_the_numbers(
    cli: ForkedCli, tmp_path: Path
) -> None:
    undisturbed, run_dir = tmp_path / "undisturbed", tmp_path / "run"
    assert cli.run(["train", *SMALL, f"run.dir={undisturbed}"]).exit_code == 0
    words = ["launch", "local", *SMALL, f"run.dir={run_dir}", "--max-restarts=1"]
    run = cli.start(words)
    wait_until((run_dir / "checkpoints/step_000001").exists)
    (rank,) = psutil.Process(run.pid).children()
    rank.kill()
    wait_until(lambda: psutil.Process(run.pid).children() not in ([], [rank]))
    wait_until(lambda: len((run_dir / "metrics.jsonl").read_text().splitlines()) > 1)
    os.kill(run.pid, signal.SIGTERM)
    ended = run.wait()
    assert ended.exit_code == 75, ended.stderr
    assert "a rank ended with exit code 137; restart 1 of 1" in ended.stderr
    assert not (run_dir / "summary.json").exists()
    assert cli.run(["train", *SMALL, f"run.dir={run_dir}", "--resume"]).exit_code == 0
    assert compare_runs(undisturbed, run_dir) == []


def test_wrong_input_is_not_started_again(cli: ForkedCli, tmp_path: Path) -> None:
    ended = cli.run(["launch", "local", *SMALL, f"run.dir={tmp_path}", "model.path=/nowhere"])
    assert ended.exit_code == 2
    assert "restart" not in ended.stderr
