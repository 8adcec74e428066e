"""A rank that dies is started again, a stop is passed on, the numbers stay."""

import os
import signal
from pathlib import Path

import psutil
from forked_cli import Finished, ForkedCli, Run
from processes import wait_until
from run_differences import compare_runs, read_lines
from small_run import FOUR_STEPS, QUICKSTART

SMALL = [QUICKSTART, *FOUR_STEPS]


def test_killed_rank_closed_terminal_and_ctrl_c_leave_no_trace_in_the_numbers(
    cli: ForkedCli, tmp_path: Path
) -> None:
    # Enough steps for all three to hit a run that is under way.
    settings = [*SMALL, "run.steps=12"]
    undisturbed, run_dir = tmp_path / "undisturbed", tmp_path / "run"
    assert cli.run(["train", *settings, f"run.dir={undisturbed}"]).exit_code == 0

    def num_steps() -> int:
        return len(read_lines(run_dir / "metrics.jsonl"))

    def stopped(run: Run) -> Finished:
        """Its end, after a whole step, of which there is a checkpoint."""
        ended = run.wait()
        assert ended.exit_code == 75, ended.stderr
        steps = num_steps()
        newest = max(path.name for path in (run_dir / "checkpoints").iterdir())
        assert f"stopped after step {steps}, checkpoint {newest}; continue with" in ended.stdout
        assert newest == f"step_{steps:06d}"
        assert not (run_dir / "summary.json").exists()
        return ended

    run = cli.start(["launch", "local", *settings, f"run.dir={run_dir}", "--max-restarts=1"])
    wait_until((run_dir / "checkpoints/step_000001").exists)
    (rank,) = psutil.Process(run.pid).children()
    rank.kill()
    before = num_steps()
    wait_until(lambda: psutil.Process(run.pid).children() not in ([], [rank]))
    wait_until(lambda: num_steps() > before)
    os.kill(run.pid, signal.SIGHUP)  # the terminal is closed
    assert "a rank ended with exit code 137; restart 1 of 1" in stopped(run).stderr
    before = num_steps()
    run = cli.start(["train", *settings, f"run.dir={run_dir}", "--resume"])
    wait_until(lambda: num_steps() > before)
    os.kill(run.pid, signal.SIGINT)  # Ctrl-C
    assert "stopping after this step; Ctrl-C again stops at once" in stopped(run).stderr
    assert before < num_steps() < 12
    assert cli.run(["train", *settings, f"run.dir={run_dir}", "--resume"]).exit_code == 0
    assert compare_runs(undisturbed, run_dir) == []


def test_a_run_goes_on_when_nobody_reads_what_it_prints(cli: ForkedCli, tmp_path: Path) -> None:
    nobody = "import os; r, w = os.pipe(); os.dup2(w, 1); os.close(r)"
    ended = cli.run(["train", *SMALL, "run.steps=2", f"run.dir={tmp_path}"], prelude=nobody)
    assert ended.exit_code == 0, ended.stderr
    assert ended.stderr.count("standard output was closed: continuing without it") == 1
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 2
    assert (tmp_path / "hf/config.json").exists()


def test_a_base_run_leaves_an_evaluation_and_nothing_else(cli: ForkedCli, tmp_path: Path) -> None:
    words = ["train", *SMALL, "run.steps=0", f"run.dir={tmp_path}"]
    assert cli.run(words).exit_code == 0
    assert len(read_lines(tmp_path / "evals.jsonl")) == 1
    assert not (tmp_path / "hf").exists() and not (tmp_path / "rollouts").exists()
    assert "the run is finished; nothing is left" in cli.run([*words, "--resume"]).stdout


# Long, and nothing that would end.
LONG = ("num_problems=100", "samples_per_problem=60", "max_response_tokens=800")
LONG_EVALUATION = [f"eval.{key}" for key in (*LONG, "temperature=3", "top_p=1")]
AT_THE_LAST_EVALUATION = """
import os, signal
from megatron_opsft.run.record.evaluations import Evaluations
evaluate = Evaluations.evaluate
def stopped(self, step):
    if step:
        os.kill(os.getpid(), signal.SIGTERM)
    evaluate(self, step)
Evaluations.evaluate = stopped
"""


def test_a_signal_amid_the_first_evaluation_ends_the_run(cli: ForkedCli, tmp_path: Path) -> None:
    words = [*SMALL, f"run.dir={tmp_path}", "--ranks=2", *LONG_EVALUATION]
    run = cli.start(["launch", "local", *words])
    wait_until(lambda: "evaluating on" in run.stderr)
    # Nothing that another machine could reach: the store, and what gloo opens for each group.
    processes = [one := psutil.Process(run.pid), *one.children(recursive=True)]
    sockets = [socket for one in processes for socket in one.net_connections("inet")]
    heard = [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]
    assert len(heard) >= 3 and set(heard) == {"127.0.0.1"}
    os.kill(run.pid, signal.SIGTERM)
    ended = run.wait(30)
    assert ended.exit_code == 75, ended.stderr
    assert "stopped before step 1; continue with --resume" in ended.stdout
    assert ended.stderr.count("SIGTERM: stopping after this step") == 1
    assert "restart" not in ended.stderr
    assert not (tmp_path / "evals.jsonl").exists()


AT_THE_FIRST_EVALUATION = AT_THE_LAST_EVALUATION.replace("if step", "if not step").replace(
    "SIGTERM", "SIGINT"
)


def test_a_ctrl_c_before_the_first_step_saves_nothing_and_a_resume_begins(
    cli: ForkedCli, tmp_path: Path
) -> None:
    """Its exit code is the signal's, as there is no checkpoint to requeue for."""
    words = ["train", *SMALL, "run.steps=1", f"run.dir={tmp_path}"]
    ended = cli.run(words, prelude=AT_THE_FIRST_EVALUATION)
    assert ended.exit_code == 128 + signal.SIGINT, ended.stderr
    assert ended.stdout.endswith("stopped before step 1; continue with --resume\n")
    assert not any((tmp_path / "checkpoints").iterdir())
    resumed = cli.run([*words, "--resume"])
    assert resumed.exit_code == 0 and "continues from the start: 0 of 1 steps" in resumed.stdout
    assert [line["step"] for line in read_lines(tmp_path / "evals.jsonl")] == [0, 1]


def test_a_signal_amid_the_last_evaluation_keeps_the_step(cli: ForkedCli, tmp_path: Path) -> None:
    words = ["train", *SMALL, "run.steps=1", f"run.dir={tmp_path}"]
    ended = cli.run(words, prelude=AT_THE_LAST_EVALUATION)
    assert ended.exit_code == 75, ended.stderr
    assert "stopped after step 1, checkpoint step_000001" in ended.stdout
    assert [line["step"] for line in read_lines(tmp_path / "evals.jsonl")] == [0]
    assert cli.run([*words, "--resume"]).exit_code == 0
    assert [line["step"] for line in read_lines(tmp_path / "evals.jsonl")] == [0, 1]
    assert (tmp_path / "hf/config.json").exists()
