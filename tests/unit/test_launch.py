"""`megatron-opsft launch`: which ends are started again, and the command line that sbatch gets."""

import os
import shlex
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import yaml
from forked_cli import ROOT, ForkedCli

from megatron_opsft.errors import UserError
from megatron_opsft.launch.commands import Local, run_with_restarts
from megatron_opsft.launch.slurm import Resources, batch_job, submit

QUICKSTART = ROOT / "examples/configs/quickstart.yaml"
RESOURCES = Resources(nodes=4, ranks_per_node=8, gpus_per_node=8)


@pytest.mark.parametrize(
    ("codes", "max_restarts", "starts"),
    [
        ([0], 3, [False]),
        ([137, 1, 0], 3, [False, True, True]),
        ([1, 69, 134], 2, [False, True, True]),
        ([1], 0, [False]),
        ([1, 75], 3, [False, True]),
        ([2], 3, [False]),
        ([3], 3, [False]),
    ],
)
def test_only_crashes_are_started_again(
    codes: list[int], max_restarts: int, starts: list[bool]
) -> None:
    seen: list[bool] = []

    def start(again: bool) -> int:
        seen.append(again)
        return codes[len(seen) - 1]

    assert run_with_restarts(start, max_restarts) == codes[-1]
    assert seen == starts


@pytest.mark.parametrize("died_before_it_was_replaced", [True, False])
def test_a_run_that_is_to_be_replaced_is_never_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, died_before_it_was_replaced: bool
) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"kind": "run"}')
    flags: list[str] = []

    class FakeTorchrun(AbstractContextManager["FakeTorchrun"]):
        def __init__(self, num_ranks: int) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            pass

        def run(self, arguments: list[str]) -> int:
            flags.append(arguments[-1])
            if len(flags) > died_before_it_was_replaced:
                manifest.unlink()
                manifest.write_text("{...}")
            return 1 if len(flags) < 3 else 0

    monkeypatch.setattr("megatron_opsft.launch.torchrun.Torchrun", FakeTorchrun)
    command = Local(config=QUICKSTART, keys=(f"run.dir={tmp_path}",), overwrite=True)
    assert command.run() == 0
    second = "--overwrite" if died_before_it_was_replaced else "--resume=auto"
    assert flags == ["--overwrite", second, "--resume=auto"]


def python(program: str, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=50,
    )


EARLY_STOP = """
import os, signal, subprocess
from megatron_opsft.launch import torchrun

def run(options):
    os.kill(os.getpid(), signal.SIGTERM)  # before there is any rank
    rank = subprocess.Popen(["sleep", "60"])
    raise SystemExit(f"rank: {rank.wait()}")

torchrun.torchrun.run = run
with torchrun.Torchrun(1) as started:
    started.run(["train"])
"""


def test_a_stop_reaches_ranks_that_start_after_it() -> None:
    assert f"rank: -{signal.SIGTERM.value}" in python(EARLY_STOP).stderr


UNKNOWN_NAME = """
import socket, sys
socket.getfqdn = socket.gethostname = lambda *args: "no-such-host.invalid"
from megatron_opsft.launch.torchrun import Torchrun

with Torchrun(1) as started:
    sys.exit(started.run(["--version"]))
"""
IN_RANK = """
import os
if "RANK" in os.environ:
    print("rendezvous:", os.environ["MASTER_ADDR"])
"""


def test_ranks_meet_where_the_name_of_the_machine_does_not_resolve(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(IN_RANK)
    ended = python(UNKNOWN_NAME, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "rendezvous: localhost"


STOPPED_TWICE = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "train":
    from megatron_opsft.runtime.phase import StopSignal
    stop = StopSignal(0)
    os.kill(os.getpid(), int(sys.argv[2]))
    assert stop.requested
    os.kill(os.getpid(), signal.SIGINT)
else:
    from megatron_opsft.launch.torchrun import Torchrun
    with Torchrun(1):
        rank = subprocess.Popen(["sh", "-c", "trap '' TERM INT; exec sleep 60"])
        print(rank.pid, flush=True)
        os.kill(os.getpid(), int(sys.argv[2]))
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("command", "first"),
    [("train", signal.SIGINT), ("train", signal.SIGTERM), ("launch", signal.SIGINT)],
)
def test_ctrl_c_after_any_stop_ends_everything_at_once(command: str, first: signal.Signals) -> None:
    ended = python(STOPPED_TWICE, command, str(first.value))
    assert ended.returncode == 130, ended.stderr
    said = "stopping after this step; Ctrl-C again stops at once\n"
    assert (said in ended.stderr) == (first is signal.SIGINT)
    if command == "launch":
        assert not psutil.pid_exists(int(ended.stdout)) or (
            psutil.Process(int(ended.stdout)).status() == psutil.STATUS_ZOMBIE
        )


def test_nohup_keeps_a_run_from_hearing_that_the_terminal_is_gone() -> None:
    hears = "from megatron_opsft.runtime.phase import heard_signals; print(heard_signals())"
    words = [sys.executable, "-c", hears]
    assert "SIGHUP" in subprocess.run(words, capture_output=True, text=True).stdout
    ended = subprocess.run(["nohup", *words], capture_output=True, text=True)
    assert "SIGTERM" in ended.stdout and "SIGHUP" not in ended.stdout


def test_output_that_was_closed_from_the_beginning_is_none() -> None:
    words = f"{shlex.quote(sys.executable)} -m megatron_opsft methods"
    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        assert (
            subprocess.run(["sh", "-c", f"{words} {closed}"], capture_output=True).returncode == 0
        )


@pytest.mark.parametrize("kib", [400_000, 1_500_000])
def test_too_little_address_space_is_one_line(tmp_path: Path, kib: int) -> None:
    words = f"{shlex.quote(sys.executable)} -m megatron_opsft train {shlex.quote(str(QUICKSTART))}"
    run = f"ulimit -v {kib}; exec {words} run.dir={shlex.quote(str(tmp_path))} run.device=cpu"
    ended = subprocess.run(["sh", "-c", run], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    *_, line = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert f"may have {kib // 1024} MiB of address space, which is too little (ulimit -v)" in line


@pytest.mark.parametrize("where", ["argument", "file"])
def test_a_name_that_the_locale_has_no_letters_for_is_one_line(tmp_path: Path, where: str) -> None:
    config = config_file(tmp_path, "a", "\u00e4")
    words = ["train", str(config), *([f"run.dir={tmp_path}/\u00e4"] if where == "argument" else [])]
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_opsft", *words],
        env={**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ") and line.endswith("set LC_ALL=C.UTF-8, or PYTHONUTF8=1")


def test_defaults_ask_for_what_the_script_asks_for() -> None:
    """`launch slurm CONFIG` and `sbatch slurm/train.sh CONFIG` are the same job."""
    one_node = RESOURCES.model_copy(update={"nodes": 1})
    job = batch_job({QUICKSTART: Path("runs/a")}, [], one_node)
    header = (ROOT / "slurm/train.sh").read_text().splitlines()
    in_script = {line.removeprefix("#SBATCH ") for line in header if line.startswith("#SBATCH ")}
    options = set(job.command[1:-2])
    assert options - in_script == {"--job-name=opsft-a"}
    assert job.command[-2:] == (str(ROOT / "slurm/train.sh"), str(QUICKSTART))


def test_printed_line_is_what_is_submitted_and_a_refusal_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways end in the same arguments and variables of sbatch."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\nprintf "%s|" "$@" "$VENV" "$PROJECT_DIR"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = batch_job({Path("a.yaml"): Path("runs/a")}, ["x.y='1 2'"], RESOURCES)
    printed = subprocess.run(["sh", "-c", job.command_line()], capture_output=True, text=True)
    assert printed.stdout == submit(job)
    assert "|x.y='1 2'|" in printed.stdout
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid account' >&2; exit 1\n")
    with pytest.raises(UserError, match="sbatch refused the job: sbatch: error: invalid account"):
        submit(job)


def test_environment_of_the_caller_is_kept_if_it_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "VENV" in batch_job({QUICKSTART: Path("a")}, [], RESOURCES).variables
    monkeypatch.setenv("CONTAINER_IMAGE", "opsft.sif")
    assert "VENV" not in batch_job({QUICKSTART: Path("a")}, [], RESOURCES).variables


def config_file(directory: Path, name: str, run_dir: str) -> Path:
    tree = yaml.safe_load(QUICKSTART.read_text())
    tree["run"]["dir"] = run_dir
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_several_configs_are_an_array(cli: ForkedCli, tmp_path: Path) -> None:
    configs = [config_file(tmp_path, name, f"runs/{name}") for name in "abc"]
    ended = cli.run(["launch", "slurm", *configs, "optimizer.lr=1e-5", "--dry-run"])
    assert ended.exit_code == 0, ended.stderr
    words = shlex.split(ended.stdout)
    assert f"{configs[0]} {configs[1]} {configs[2]}" == words[-2]
    assert "--array=0-2" in words
    assert words[-1] == "optimizer.lr=1e-5"


def test_mistakes_are_found_before_anything_is_submitted(cli: ForkedCli, tmp_path: Path) -> None:
    same = [config_file(tmp_path, name, "runs/same") for name in "de"]
    for words, message in (
        ([*same], "have the same run.dir"),
        (["x.y=1"], "Missing argument 'CONFIGS...'"),
        ([same[0], "optimizer.warmup=1"], "did you mean optimizer.warmup_steps?"),
        ([same[0], "parallel.tp=3"], "world size 8 is not a multiple of parallel.tp"),
        ([same[0], "--partition=gpu"], "there is no sbatch here"),
    ):
        ended = cli.run(["launch", "slurm", *words], prelude="import os; os.environ['PATH'] = ''")
        assert ended.exit_code == 2
        assert message in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
