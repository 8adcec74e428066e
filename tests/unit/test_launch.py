"""How ranks start: together, again after which ends, and as the command line that sbatch gets."""

import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from forked_cli import ROOT, ForkedCli
from processes import rank_environments

from megatron_opsft.commands.cli import PROGRAM
from megatron_opsft.commands.command_line import invoke
from megatron_opsft.commands.launch.commands import FINAL_EXIT_CODES, Local, run_with_restarts
from megatron_opsft.commands.launch.local_ranks import LocalRanks
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.job import allow_open_files, listen_on_loopback
from megatron_opsft.runtime.launched import is_launched, is_on_one_machine

QUICKSTART = ROOT / "examples/configs/quickstart.yaml"
LAUNCH = ["launch", "slurm", str(QUICKSTART), "run.dir=runs/a"]


@pytest.mark.parametrize(
    ("codes", "max_restarts", "starts"),
    [
        ([0], 3, [False]),
        ([137, 1, 0], 3, [False, True, True]),
        ([1, 134], 1, [False, True]),
        ([1, 75], 3, [False, True]),
        *(([code], 3, [False]) for code in FINAL_EXIT_CODES),
    ],
)
def test_only_crashes_are_started_again(
    codes: list[int], max_restarts: int, starts: list[bool]
) -> None:
    ends, seen = iter(codes), []

    def start(again: bool) -> int:
        seen.append(again)
        return next(ends)

    assert run_with_restarts(start, max_restarts) == codes[-1]
    assert seen == starts


@pytest.mark.parametrize("died_before_it_was_replaced", [True, False])
def test_a_run_that_is_to_be_replaced_is_never_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, died_before_it_was_replaced: bool
) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"kind": "run"}')
    flags: list[str] = []

    def run(self: LocalRanks, arguments: list[str]) -> int:
        flags.append(arguments[-1])
        if len(flags) > died_before_it_was_replaced:
            manifest.unlink()
            manifest.write_text("{...}")
        return 1 if len(flags) < 3 else 0

    monkeypatch.setattr(LocalRanks, "run", run)
    command = Local(config=QUICKSTART, keys=(f"run.dir={tmp_path}",), overwrite=True)
    assert command.run() == 0
    second = "--overwrite" if died_before_it_was_replaced else "--resume=auto"
    assert flags == ["--overwrite", second, "--resume=auto"]


def test_a_run_that_was_not_there_is_resumed_once_its_first_start_has_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: list[str] = []

    def run(self: LocalRanks, arguments: list[str]) -> int:
        flags.append(arguments[-1])
        (tmp_path / "manifest.json").write_text("{...}")
        return 1 if len(flags) < 2 else 0

    monkeypatch.setattr(LocalRanks, "run", run)
    command = Local(config=QUICKSTART, keys=(f"run.dir={tmp_path}",), overwrite=True)
    assert command.run() == 0
    assert flags == ["--overwrite", "--resume=auto"]


def test_what_is_to_be_resumed_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalRanks, "run", lambda self, arguments: 0)
    keys = (f"run.dir={tmp_path / 'none'}",)
    with pytest.raises(UserError, match="none"):
        Local(config=QUICKSTART, keys=keys, resume="yes").run()
    assert Local(config=QUICKSTART, keys=keys, resume="auto").run() == 0


# Of three ranks, two come, or only one.
JOIN = """
import os
os.environ.update({each})
from datetime import timedelta
import click
from megatron_opsft.commands.cli import main
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.job import join_job

join = lambda: join_job(select_device("cpu"), timedelta(hours=1), timedelta(seconds=3))
main(click.Command("join", callback=join))
"""


@pytest.mark.parametrize(
    ("ranks", "message"),
    [((0, 2), "rank 1 did not join"), ((1,), "rank 0 does not answer at localhost:{MASTER_PORT}")],
)
def test_every_rank_that_came_says_who_did_not(
    cli: ForkedCli, ranks: tuple[int, ...], message: str
) -> None:
    job = rank_environments(3)
    came = [cli.start([], prelude=JOIN.format(each=job[rank])) for rank in ranks]
    start = time.monotonic()
    for run, rank in zip(came, ranks, strict=True):
        ended = run.wait(50)
        who, what = f"rank {rank} on {socket.gethostname()}", message.format(**job[rank])
        said = f"error: {who} in phase start: {what} within 0.05 min of the start\n"
        assert (ended.exit_code, ended.stderr) == (69, said)
    # Patience, hearing, letting rank 0 speak first; room.
    assert time.monotonic() - start < 3 + 1 + 3 + 4


def test_the_port_of_another_program_is_named(cli: ForkedCli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        job = rank_environments(2, silent.getsockname()[1])
        runs = [cli.start([], prelude=JOIN.format(each=each)) for each in job]
        first, second = [run.wait(50) for run in runs]
    assert (first.exit_code, second.exit_code) == (69, 69)
    told = "another program has localhost:{MASTER_PORT}; change MASTER_PORT\n".format(**job[0])
    assert told in first.stderr and "may have this port" in second.stderr


def test_a_variable_that_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not is_launched()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="not set WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        is_launched()


@pytest.mark.parametrize(
    ("variables", "num_tasks"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}, 2),
        ({"SLURM_STEP_ID": "3", "SLURM_NTASKS": "16"}, 16),
        # `srun -n 1` in a larger job, a batch script, an interactive shell.
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "2"}, 1),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, 1),
        ({"SLURM_STEP_ID": "4294967291", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, 1),
    ],
)
def test_tasks_of_srun_without_ranks_are_told_apart_from_a_process_alone(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], num_tasks: int
) -> None:
    for name in ("RANK", "WORLD_SIZE", *(n for n in os.environ if n.startswith("SLURM_"))):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if num_tasks == 1:
        assert not is_launched()
        return
    with pytest.raises(UserError, match=f"srun has started {num_tasks} tasks"):
        is_launched()
    for name, value in rank_environments(num_tasks)[0].items():
        monkeypatch.setenv(name, value)
    assert is_launched()


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_processes_of_mpirun_without_ranks_are_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for other in ("RANK", "WORLD_SIZE", *(n for n in os.environ if n.startswith("SLURM_"))):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "1")
    assert not is_launched()
    monkeypatch.setenv(name, "8")
    with pytest.raises(UserError, match=rf"mpirun has started 8 processes \({name}\)"):
        is_launched()
    for key, value in rank_environments(8)[3].items():  # by torchrun below mpirun
        monkeypatch.setenv(key, value)
    assert is_launched()


@pytest.mark.parametrize(
    ("environment", "is_here"),
    [
        ({}, True),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.7", "LOCAL_WORLD_SIZE": "8"}, True),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.7", "LOCAL_WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.7"}, False),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "127.0.1.1"}, True),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "localhost"}, True),
    ],
)
def test_ranks_of_one_machine_listen_on_loopback_alone(
    environment: dict[str, str], is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", *names):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_on_one_machine() == is_here
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")  # the user's own stays
    monkeypatch.setattr(os, "environ", dict(os.environ))  # for this test alone
    listen_on_loopback()
    assert [os.environ[name] for name in names] == ["lo", "ib0"]


def test_a_job_that_needs_more_open_files_than_it_may_have_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: taken.append(limits))
    said = "rank 0 of 4096 needs 12704 open files and may have 4096; raise the hard limit"
    with pytest.raises(UserError, match=said):
        allow_open_files(0, 4096)
    allow_open_files(1, 4096)
    allow_open_files(0, 1226)  # 3,678 and 416: 4,094
    with pytest.raises(UserError, match="needs 4097 open files"):
        allow_open_files(0, 1227)
    assert taken == [(4096, 4096)] * 2


@pytest.mark.parametrize("command", ["train", "eval"])
def test_no_task_of_srun_works_alone(cli: ForkedCli, tmp_path: Path, command: str) -> None:
    out = tmp_path / "out"
    words = {
        "train": ["train", QUICKSTART, f"run.dir={out}"],
        "eval": ["eval", "--model=tiny_reasoner", f"--out={out}", "limit=1", "samples=1"],
    }[command]
    for task in ("0", "1"):
        step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": task}
        error = cli.run(words, prelude=f"import os\nos.environ.update({step})").error
        assert "torchrun" in error and "`megatron-opsft launch slurm`" in error
    assert not out.exists()


EARLY_STOP = """
import os, signal, subprocess
from megatron_opsft.commands.launch import local_ranks

popen = subprocess.Popen

def start(*words, **settings):
    os.kill(os.getpid(), signal.SIGTERM)  # before there is any rank
    return popen(["sleep", "60"])

local_ranks.subprocess.Popen = start
with local_ranks.LocalRanks(1) as ranks:
    print("code:", ranks.run(["train"]))
"""


def test_a_stop_reaches_ranks_that_start_after_it(cli: ForkedCli) -> None:
    assert cli.run(["--version"], prelude=EARLY_STOP).stdout.startswith("code: 75\n")


ONE_HANGS = """
import os, time
if "RANK" in os.environ:
    if os.environ["RANK"] == "1":
        os._exit(3)
    time.sleep(60)
"""
HANGING_RANKS = """
import os, sys, time
from megatron_opsft.commands.launch import local_ranks
os.environ["PYTHONPATH"] = os.pathsep.join([{place!r}, os.environ.get("PYTHONPATH", "")])
local_ranks._GRACE_SECONDS = 0.2
begin = time.monotonic()
with local_ranks.LocalRanks(2) as ranks:
    print(ranks.run(["--version"]), time.monotonic() - begin < 30)
"""


def test_a_rank_that_goes_on_after_another_has_failed_is_ended(
    cli: ForkedCli, tmp_path: Path
) -> None:
    """The exit code is that of the first."""
    (tmp_path / "sitecustomize.py").write_text(ONE_HANGS)
    ended = cli.run(["--version"], prelude=HANGING_RANKS.format(place=str(tmp_path)))
    assert "3 True" in ended.stdout.splitlines(), ended.stderr


UNKNOWN_NAME = """
import os, socket, sys
os.environ["PYTHONPATH"] = os.pathsep.join([{place!r}, os.environ.get("PYTHONPATH", "")])
socket.getfqdn = socket.gethostname = lambda *args: "no-such-host.invalid"
from megatron_opsft.commands.launch.local_ranks import LocalRanks

with LocalRanks(1) as started:
    sys.exit(started.run(["--version"]))
"""
IN_RANK = """
import os
if "RANK" in os.environ:
    print("rendezvous:", os.environ["MASTER_ADDR"])
"""


def test_ranks_meet_where_the_name_of_the_machine_does_not_resolve(
    cli: ForkedCli, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(IN_RANK)
    ended = cli.run([], prelude=UNKNOWN_NAME.format(place=str(tmp_path)))
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "rendezvous: localhost"


TRAIN_STOPPED_TWICE = """
import os, signal, time
from megatron_opsft.runtime.phase import StopSignal
stop = StopSignal(0)
os.kill(os.getpid(), {first})
assert stop.requested
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""
LAUNCH_STOPPED_TWICE = """
import os, signal, subprocess, time
from megatron_opsft.commands.launch.local_ranks import LocalRanks
with LocalRanks(1):
    rank = subprocess.Popen(["sh", "-c", "trap '' TERM INT; exec sleep 60"])
    print(rank.pid, flush=True)
    os.kill(os.getpid(), {first})
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("program", "first"),
    [
        (TRAIN_STOPPED_TWICE, signal.SIGINT),
        (TRAIN_STOPPED_TWICE, signal.SIGTERM),
        (LAUNCH_STOPPED_TWICE, signal.SIGINT),
    ],
)
def test_ctrl_c_after_any_stop_ends_everything_at_once(
    cli: ForkedCli, program: str, first: signal.Signals
) -> None:
    ended = cli.run([], prelude=program.format(first=first.value))
    assert ended.exit_code == 130, ended.stderr
    said = "stopping after this step; Ctrl-C again stops at once\n"
    assert (said in ended.stderr) == (first is signal.SIGINT)
    assert ended.stderr.endswith("\nstopped at once; what was saved before stays\n")
    for pid in map(int, ended.stdout.split()):
        with suppress(psutil.NoSuchProcess):
            assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


PYTHON = shlex.quote(sys.executable)
TRAIN = f"exec {PYTHON} -m megatron_opsft train a.yaml run.device=cpu"
sh = partial(subprocess.run, shell=True, capture_output=True, text=True, timeout=100)


def test_nohup_keeps_a_run_from_hearing_that_the_terminal_is_gone(tmp_path: Path) -> None:
    hears = "from megatron_opsft.runtime.phase import heard_signals; print(heard_signals())"
    for nohup, hears_it in (("", True), ("nohup ", False)):
        said = sh(f"{nohup}{PYTHON} -c '{hears}'", cwd=tmp_path).stdout
        assert "SIGTERM" in said and ("SIGHUP" in said) == hears_it


def test_output_that_was_closed_from_the_beginning_is_none(tmp_path: Path) -> None:
    assert sh(f"{PYTHON} -m megatron_opsft methods <&- >&- 2>&-", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("line", "settings", "words"),
    [
        (
            f"ulimit -v 409600; {TRAIN}",
            {},
            "may have 400 MiB of address space, which is too little",
        ),
        (TRAIN, {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "LC_ALL=C.UTF"),
    ],
    ids=["ulimit", "a locale without letters of a name"],
)
def test_what_a_process_is_started_with_is_one_line_where_it_is_too_little(
    tmp_path: Path, line: str, settings: dict[str, str], words: str
) -> None:
    (tmp_path / "a.yaml").write_text(f"base: {QUICKSTART}\nrun: {{dir: ä}}\n", encoding="utf-8")
    ended = sh(line, cwd=tmp_path, env=os.environ | settings)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    *_, said = ended.stderr.splitlines()
    assert said.startswith("error: ") and words in said


def test_defaults_ask_for_what_the_script_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    """`launch slurm CONFIG` and `sbatch slurm/train.sh CONFIG` are the same job."""
    invoke(PROGRAM, [*LAUNCH, "--dry-run"])
    _, _, _, _, sbatch, *options, script, config, key = shlex.split(capsys.readouterr().out)
    header = (ROOT / "slurm/train.sh").read_text().splitlines()
    in_script = {line.removeprefix("#SBATCH ") for line in header if line.startswith("#SBATCH ")}
    assert sbatch == "sbatch" and set(options) - in_script == {"--job-name=opsft-a"}
    assert [script, config, key] == [f"{ROOT}/slurm/train.sh", f"{QUICKSTART}", "run.dir=runs/a"]


def test_each_option_is_sbatch_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"partition": "fast", "account": "me", "time": "1:00:00", "nodes": "3"}
    invoke(PROGRAM, [*LAUNCH, "--dry-run", *(f"--{key}={value}" for key, value in given.items())])
    options = shlex.split(capsys.readouterr().out)
    assert {f"--{key}={value}" for key, value in given.items()} <= {*options}


def test_printed_line_is_what_is_submitted_and_a_refusal_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both ways end in the same arguments and variables of sbatch."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\nprintf "%s|" "$@" "$VENV" "$PROJECT_DIR"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = [*LAUNCH, "--nodes=4", "data.train=1 '2'", "--sbatch=--qos=high"]
    invoke(PROGRAM, [*words, "--dry-run"])
    line = capsys.readouterr().out
    printed = sh(line).stdout
    invoke(PROGRAM, words)
    assert capsys.readouterr().out == printed + "\n"
    assert all(f"|{word}|" in printed for word in ("--nodes=4", "--qos=high", "data.train=1 '2'"))
    monkeypatch.setenv("CONTAINER_IMAGE", "opsft.sif")  # where to find Python is the caller's then
    invoke(PROGRAM, [*words, "--dry-run"])
    assert "VENV=" in line and "VENV=" not in capsys.readouterr().out
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid account' >&2; exit 1\n")
    with pytest.raises(UserError, match="sbatch refused the job: sbatch: error: invalid account"):
        invoke(PROGRAM, words)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="there is no sbatch here"):
        invoke(PROGRAM, words)
