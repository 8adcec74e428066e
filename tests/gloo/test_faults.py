"""A few faults on real runs; many at random: tools/random_faults.py."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from forked_cli import Finished, ForkedCli, Run
from jobs import run_training
from processes import rank_preludes, wait_until
from run_differences import compare_runs, read_lines
from small_run import FOUR_STEPS, QUICKSTART
from world import World

from megatron_opsft.runtime.failed_rank import PEER_LOST_EXIT_CODE

SMALL = [*FOUR_STEPS, "run.silence_seconds=4"]
# From the second checkpoint on the kernel refuses files of more than 1 MB: checkpoints are larger,
# everything else is smaller.
SMALL_DISK = """
import resource
from megatron_opsft.trainer.model.checkpoint import Checkpointer
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
from megatron_opsft.run.record.recorder import RunRecorder
record = RunRecorder.record
def record_and_lose(self, step, *args):
    record(self, step, *args)
    if step == 2:
        shutil.rmtree({lost!r})
RunRecorder.record = record_and_lose
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
# An engine whose program has a fault.
FAILING_ENGINE = """
from megatron_opsft.rollout.hf.engine import HfEngine
stream = HfEngine.stream
def stream_and_fail(self, take, sampling):
    for ended in stream(self, take, sampling):
        if self.version == 2:
            raise RuntimeError("this engine has lost its mind")
        yield ended
HfEngine.stream = stream_and_fail
"""
# An engine that reads a model's rotary embedding otherwise than the trainer does.
OTHER_MODEL = """
from megatron_opsft.rollout.hf.engine import HfEngine
score = HfEngine.score
def score_otherwise(self, samples):
    self.model.model.rotary_emb.inv_freq.mul_(0.1)
    return score(self, samples)
HfEngine.score = score_otherwise
"""
# An engine that loses a weight of the second update.
LOST_WEIGHT = """
from megatron_opsft.rollout.hf.engine import HfEngine
finish_update = HfEngine.finish_update
def finish_and_lose(self, version):
    finish_update(self, version)
    if version == 2:
        next(iter(self.weights().values())).view(-1)[7] += 1
HfEngine.finish_update = finish_and_lose
"""


def start_two_ranks(cli: ForkedCli, words: list[str], second: str = "") -> tuple[Run, Run]:
    """second: Python that the second one executes first."""
    of_first, of_second = rank_preludes(2)
    return cli.start(words, of_first), cli.start(words, of_second + second)


def run_on_two_ranks(
    cli: ForkedCli, words: list[str], second: str = ""
) -> tuple[Finished, Finished]:
    """Both ranks' ends; otherwise as `start_two_ranks`."""
    first, other = start_two_ranks(cli, words, second)
    return first.wait(), other.wait()


def check_lost(ended: Finished, dead: Finished, words: str) -> None:
    assert dead.exit_code == -signal.SIGKILL
    assert ended.exit_code == PEER_LOST_EXIT_CODE, ended.stderr
    assert "rank 1 on " in error_of(ended) and words in error_of(ended)


def error_of(ended: Finished) -> str:
    """The one line, whatever the exit code."""
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    return error


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
    check_lost(ended, dead, "died in phase rollout of step 3")
    for again in run_on_two_ranks(cli, [*words, "--resume"]):
        assert again.exit_code == 0, again.stderr
    assert compare_runs(undisturbed, tmp_path) == []
    shutil.rmtree(tmp_path / "checkpoints")  # a run that is finished does without
    third, _ = run_on_two_ranks(cli, [*words, "--resume"])
    assert third.exit_code == 0, third.stderr
    assert third.stdout == f"{tmp_path}: the run is finished; nothing is left\n"
    assert compare_runs(undisturbed, tmp_path) == []


def test_an_exception_in_one_rank_ends_the_others_within_five_seconds(
    cli: ForkedCli, tmp_path: Path
) -> None:
    """With the patience that a run has by default; the other rank waits in a collective."""
    words = ["train", QUICKSTART, *FOUR_STEPS, f"run.dir={tmp_path}"]
    other, failing = start_two_ranks(cli, words, FAILING_ENGINE)
    failed = failing.wait()
    assert (other.wait(5).exit_code, failed.exit_code) == (1, 1)
    assert "Traceback" in failed.stderr
    said = "in phase rollout of step 3: RuntimeError: this engine has lost its mind"
    (error,) = [line for line in failed.stderr.splitlines() if line.startswith("error: ")]
    assert "rank 1 on " in error and said in error


def test_an_engine_that_computes_another_model_ends_the_run_before_its_first_step(
    cli: ForkedCli, tmp_path: Path
) -> None:
    """Checksums are equal, but the log-probs cannot be one model's."""
    words = ["train", QUICKSTART, *SMALL, f"run.dir={tmp_path / 'a'}"]
    ended = cli.run(words, OTHER_MODEL)
    assert ended.exit_code == 2 and "Traceback" not in ended.stderr
    assert "their log-probs differ by" in ended.error and "config.json" in ended.error
    assert not (tmp_path / "a/metrics.jsonl").exists()
    # One who wants to see what comes of it may.
    ended = cli.run([*words, "sync.logprob_alarm=1", "run.steps=1", "--overwrite"], OTHER_MODEL)
    assert ended.exit_code == 0, ended.stderr


def test_a_weight_that_a_sync_loses_ends_all_ranks_with_3(cli: ForkedCli, tmp_path: Path) -> None:
    words = ["train", QUICKSTART, *SMALL, f"run.dir={tmp_path}"]
    both = run_on_two_ranks(cli, words, LOST_WEIGHT)
    assert [ended.exit_code for ended in both] == [3, 3]
    said = "sync of weight version 2: the engine of rank 1 does not hold the trainer's "
    (error,) = [line for ended in both for line in ended.stderr.splitlines() if "error: " in line]
    assert said in error and "nothing was sampled from them" in error
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["verify.judge=own_judges:nan"], "TypeError: it returned nan, which is neither right nor"),
        (
            ["verify.judge=own_judges:only_late", "verify.timeout_seconds=0.2"],
            "it took longer than verify.timeout_seconds=0.2; raise that",
        ),
    ],
)
def test_a_judge_that_always_fails_ends_all_ranks_before_the_first_step(
    cli: ForkedCli, undisturbed: Path, tmp_path: Path, keys: list[str], why: str
) -> None:
    """With the first reason, which one rank may know alone; when it is mended the run goes on."""
    words = ["train", QUICKSTART, *SMALL, "eval.max_response_tokens=300", f"run.dir={tmp_path}"]
    both = run_on_two_ranks(cli, [*words, *keys])
    assert [ended.exit_code for ended in both] == [2, 2]
    (error,) = [line for ended in both for line in ended.stderr.splitlines() if "error: " in line]
    assert f"none of the responses to 4 problems could be judged; the first: {why}" in error
    assert not (tmp_path / "evals.jsonl").exists() and not (tmp_path / "metrics.jsonl").exists()
    if "nan" in keys[0]:
        for again in run_on_two_ranks(
            cli, ["train", QUICKSTART, *SMALL, f"run.dir={tmp_path}", "--resume"]
        ):
            assert again.exit_code == 0, again.stderr
        assert compare_runs(undisturbed, tmp_path) == []


def test_a_judge_that_always_fails_ends_a_run_without_evaluations_in_its_first_step(
    cli: ForkedCli, tmp_path: Path
) -> None:
    words = ["train", QUICKSTART, *SMALL, f"run.dir={tmp_path}", "eval.data=null"]
    words += ["rollout.max_response_tokens=300", "verify.judge=own_judges:nan"]
    error = cli.run(words).error
    assert "none of the responses to 6 problems could be judged; the first: TypeError: " in error
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_judge_that_always_fails_ends_all_ranks_of_an_evaluation(
    cli: ForkedCli, tmp_path: Path
) -> None:
    """No sample is stored, and the same directory takes the mended judge."""
    words = ["eval", "--model=tiny_reasoner", f"--out={tmp_path}", "limit=24", "samples=1"]
    both = run_on_two_ranks(cli, [*words, "judge=own_judges:nan"])
    assert [ended.exit_code for ended in both] == [2, 2]
    (error,) = [line for ended in both for line in ended.stderr.splitlines() if "error: " in line]
    assert "judge own_judges:nan: none of the responses to " in error
    assert "TypeError: it returned nan, which is neither right nor wrong" in error
    assert not (tmp_path / "samples").exists()
    ended = cli.run([*words, "judge=own_judges:last_box"])
    assert ended.exit_code == 0, ended.stderr
    assert "with verifier=" in cli.run([*words, "judge=own_judges:half_of_them"]).error


def test_a_dead_rank_ends_an_evaluation(cli: ForkedCli, tmp_path: Path) -> None:
    words = ["eval", "--model=tiny_reasoner", f"--out={tmp_path}", "limit=40", "samples=4"]
    ended, dead = run_on_two_ranks(cli, words, DYING_ENGINE.replace("== 2", "== 0"))
    check_lost(ended, dead, "died in phase evaluate")


def test_a_stopped_rank_and_a_damaged_checkpoint_leave_no_trace(
    cli: ForkedCli, undisturbed: Path, tmp_path: Path
) -> None:
    words = ["train", QUICKSTART, *SMALL, f"run.dir={tmp_path}"]
    first, second = start_two_ranks(cli, words)
    wait_until((tmp_path / "checkpoints/step_000002").exists)
    os.kill(first.pid, signal.SIGSTOP)  # the rank that gives checkpoints their names
    damaged = max((tmp_path / "checkpoints").glob("step_*")) / ".metadata"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    left = second.wait(20)
    assert (first.wait(20).exit_code, left.exit_code) == (-signal.SIGKILL, PEER_LOST_EXIT_CODE)
    assert "rank 0 on " in error_of(left) and "no sign of life for 4 s" in error_of(left)
    ended, other = run_on_two_ranks(cli, [*words, "--resume"])
    assert (ended.exit_code, other.exit_code) == (0, 0), ended.stderr
    (fallback,) = [line for line in ended.stderr.splitlines() if str(damaged) in line]
    assert "is damaged: its checksum differs" in fallback and "continues from" in fallback
    assert "Traceback" not in ended.stderr
    assert compare_runs(undisturbed, tmp_path) == []


def test_full_disk_keeps_what_is_there_and_the_run_goes_on_later(
    cli: ForkedCli, four_steps: Path, tmp_path: Path
) -> None:
    words = ["train", QUICKSTART, *SMALL, f"run.dir={tmp_path}"]
    ended = cli.run(words, prelude=SMALL_DISK)
    assert ended.stderr.count("the older checkpoints stay, and the run continues") == 2
    assert all(word in ended.error for word in (".partial_000004", "bytes", "--resume"))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert cli.run([*words, "--resume"]).exit_code == 0
    assert compare_runs(four_steps, tmp_path) == []


def test_deleted_rollouts_are_missed_by_nobody_and_a_deleted_run_is_one_line(
    cli: ForkedCli, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = ["train", QUICKSTART, *SMALL, f"run.dir={run_dir}"]
    ended = cli.run(words, DELETED.format(lost=str(run_dir / "rollouts")))
    assert ended.exit_code == 0, ended.stderr
    found = sorted(path.name for path in (run_dir / "rollouts").iterdir())
    assert found == ["step_000003.jsonl.gz", "step_000004.jsonl.gz"]
    ended = cli.run([*words, "--overwrite"], DELETED.format(lost=str(run_dir)))
    assert ended.error == f"error: run.dir={run_dir} was deleted while the run was writing to it"
    assert not run_dir.exists()
