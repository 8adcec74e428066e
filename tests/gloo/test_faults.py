"""A few faults on real runs; many at random: tools/random_faults.py."""

import shutil
import signal
import socket
from pathlib import Path

import psutil
import pytest
from forked_cli import Finished, ForkedCli
from jobs import run_training
from run_differences import compare_runs, read_lines
from small_run import FOUR_STEPS, QUICKSTART
from test_launch_local import wait_until
from world import World

from megatron_opsft.runtime.diagnosis import PEER_LOST_EXIT_CODE

SMALL = [*FOUR_STEPS, "run.silence_seconds=4"]
# From the second checkpoint on the kernel refuses files of more than 1 MB: checkpoints are larger,
# everything else is smaller.
SMALL_DISK = """
import resource
from megatron_opsft.model.checkpoint import Checkpointer
start = Checkpointer.start
def start_on_small_disk(self, step, *args, **kwargs):
    if step == 2:
        self.finish()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    start(self, step, *args, **kwargs)
Checkpointer.start = start_on_small_disk
"""

# After the second step somebody deletes a directory.
DELETED = """
import shutil
from megatron_opsft.run.recorder import RunRecorder
record = RunRecorder.record
def record_and_lose(self, step, *args):
    record(self, step, *args)
    if step == 2:
        shutil.rmtree({lost!r})
RunRecorder.record = record_and_lose
"""


# A rank as another launcher than torchrun would start it, and an engine that dies while it decodes.
RANK = """
import os
os.environ.update(RANK="{rank}", LOCAL_RANK="{rank}", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
"""
DYING_ENGINE = """
import signal
import time
from megatron_opsft.rollout.hf.engine import HfEngine
stream = HfEngine.stream
def stream_and_die(self, take, sampling):
    for number, ended in enumerate(stream(self, take, sampling)):
        if self.version == 2 and number == 1:
            time.sleep(2)  # until the other rank has heard in which phase this one is
            os.kill(os.getpid(), signal.SIGKILL)
        yield ended
HfEngine.stream = stream_and_die
"""


def run_on_two_ranks(
    cli: ForkedCli, words: list[str], second: str = ""
) -> tuple[Finished, Finished]:
    """Both ranks' ends; second: Python that the second one executes first."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    preludes = [RANK.format(rank=rank, port=port) for rank in range(2)]
    other = cli.start(words, prelude=preludes[1] + second)
    return cli.run(words, prelude=preludes[0]), other.wait()


def ranks_of(launcher: int) -> dict[str, psutil.Process]:
    children = psutil.Process(launcher).children()
    return {child.environ()["RANK"]: child for child in children if "RANK" in child.environ()}


def damage_newest(run_dir: Path) -> Path:
    newest = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    path = newest / "common.pt" if (newest / "common.pt").exists() else newest / ".metadata"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return path


@pytest.fixture(scope="module")
def undisturbed(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    overrides = [*SMALL, f"run.dir={run_dir}"]
    assert world.run(run_training, 2, QUICKSTART, overrides) == [0, 0]
    return run_dir


def test_a_dead_engine_ends_all_ranks_with_69_and_the_run_goes_on_later(
    cli: ForkedCli, undisturbed: Path, tmp_path: Path
) -> None:
    """An engine lives in its rank's process, which dies with it."""
    words = ["train", QUICKSTART, *SMALL, f"run.dir={tmp_path}"]
    ended, dead = run_on_two_ranks(cli, words, DYING_ENGINE)
    assert dead.exit_code == -signal.SIGKILL
    assert ended.exit_code == PEER_LOST_EXIT_CODE, ended.stderr
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "rank 1 on " in error and "died in phase rollout of step 3" in error
    for again in run_on_two_ranks(cli, [*words, "--resume"]):
        assert again.exit_code == 0, again.stderr
    assert compare_runs(undisturbed, tmp_path) == []
    shutil.rmtree(tmp_path / "checkpoints")  # a run that is finished does without
    third, _ = run_on_two_ranks(cli, [*words, "--resume"])
    assert third.exit_code == 0, third.stderr
    assert third.stdout == f"{tmp_path}: the run is finished; nothing is left\n"
    assert compare_runs(undisturbed, tmp_path) == []


def test_a_dead_rank_ends_an_evaluation(cli: ForkedCli, tmp_path: Path) -> None:
    words = ["eval", "--model=tiny_reasoner", f"--out={tmp_path}", "limit=40", "samples=4"]
    ended, dead = run_on_two_ranks(cli, words, DYING_ENGINE.replace("== 2", "== 0"))
    assert dead.exit_code == -signal.SIGKILL
    assert ended.exit_code == PEER_LOST_EXIT_CODE, ended.stderr
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "rank 1 on " in error and "died in phase evaluate" in error


def test_a_stopped_rank_and_a_damaged_checkpoint_leave_no_trace(
    cli: ForkedCli, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = ["launch", "local", QUICKSTART, *SMALL, f"run.dir={run_dir}", "--ranks=2"]
    run = cli.start([*words, "--max-restarts=1"])
    wait_until((run_dir / "checkpoints/step_000002").exists)
    first = ranks_of(run.pid)["0"]
    first.send_signal(signal.SIGSTOP)  # the rank that gives checkpoints their names
    damaged = damage_newest(run_dir)
    wait_until(lambda: not first.is_running(), 20)
    ended = run.wait()
    assert ended.exit_code == 0, ended.stderr
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "rank 0 on " in error and "no sign of life for 4 s" in error
    (fallback,) = [line for line in ended.stderr.splitlines() if str(damaged) in line]
    assert "is damaged: its checksum differs" in fallback and "continues from" in fallback
    assert "Traceback" not in ended.stderr
    assert compare_runs(undisturbed, run_dir) == []


def test_full_disk_keeps_what_is_there_and_the_run_goes_on_later(
    cli: ForkedCli, four_steps: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = ["train", QUICKSTART, *SMALL, f"run.dir={run_dir}"]
    ended = cli.run(words, prelude=SMALL_DISK)
    assert ended.exit_code == 2
    assert ended.stderr.count("the older checkpoints stay, and the run continues") == 2
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert ".partial_000004" in error and "bytes" in error and "--resume" in error
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000001"]
    assert [line["step"] for line in read_lines(run_dir / "metrics.jsonl")] == [1, 2, 3, 4]
    assert cli.run([*words, "--resume"]).exit_code == 0
    assert compare_runs(four_steps, run_dir) == []


def test_deleted_rollouts_are_missed_by_nobody(cli: ForkedCli, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    lost = DELETED.format(lost=str(run_dir / "rollouts"))
    ended = cli.run(["train", QUICKSTART, *SMALL, f"run.dir={run_dir}"], lost)
    assert ended.exit_code == 0, ended.stderr
    found = sorted(path.name for path in (run_dir / "rollouts").iterdir())
    assert found == ["step_000003.jsonl.gz", "step_000004.jsonl.gz"]


def test_a_deleted_run_is_one_line(cli: ForkedCli, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ended = cli.run(
        ["train", QUICKSTART, *SMALL, f"run.dir={run_dir}"], DELETED.format(lost=str(run_dir))
    )
    assert ended.exit_code == 2 and "Traceback" not in ended.stderr
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert error == f"error: run.dir={run_dir} was deleted while the run was writing to it"
    assert not run_dir.exists()
