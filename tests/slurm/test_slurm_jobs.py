"""The job scripts on a real cluster: two nodes, the shipped model on the CPU, a few steps.

The cluster is munged, slurmctld, and slurmd twice, in one temporary directory, under the user who
runs the tests, on free ports. Other clusters of the machine, and its own munge, are not touched.
What the scripts do with exit codes, containers and options, without SLURM:
unit/test_job_scripts.py.
"""

import getpass
import json
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import DEVNULL, Popen, run
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from forked_cli import ROOT, ForkedCli
from run_differences import compare_runs, read_lines
from small_run import SMALL_RUN

QUICKSTART = "examples/configs/quickstart.yaml"
SCRIPT = "slurm/train_7b.sh"
SETTINGS = {"CONFIG": QUICKSTART, "VENV": sys.prefix, "OMP_NUM_THREADS": "1"}
SMALL = [*SMALL_RUN, "run.steps=8"]
NODES = ("n1", "n2")
_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

# cred_expire: a requeued job waits so long before it may start; 5 is the least that SLURM takes.
# KillWait: from SIGTERM to SIGKILL.
_CONF = """\
ClusterName=opsft
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 Gres=gpu:2
PartitionName=test Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
# Devices that stand for GPUs: SLURM counts and hands them out, and looks no further.
_GRES = """\
NodeName=n[1-2] Name=gpu File=/dev/null
NodeName=n[1-2] Name=gpu File=/dev/zero
"""


def wait_until(condition: Callable[[], bool], timeout: float = 300) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class SlurmCluster:
    """The running cluster, in its directory. Jobs are submitted from the project's root."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.logs = directory, directory / "logs"
        self.env = os.environ | {"PATH": _PATH, "LOG_DIR": str(self.logs)}
        self.env["SLURM_CONF"] = str(directory / "slurm.conf")

    def call(self, command: Sequence[str], **settings: str) -> str:
        """Standard output of a program that must succeed; settings: environment variables."""
        env = self.env | settings
        ended = run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
        return ended.stdout.strip()

    def submit(self, command: Sequence[str], settings: Mapping[str, str]) -> str:
        """sbatch's command line, with the job's output in `output`; the job's id."""
        output = {"SBATCH_OUTPUT": str(self.directory / "%A_%a-%j.out")}
        return self.call(command, **settings, **output).removeprefix("Submitted batch job ")

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`, such as JobState, Restarts, or ExitCode."""
        fields = self.call(["scontrol", "show", "job", "--oneliner", job]).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)[name]

    def wait(self, job: str) -> str:
        """The state in which the job ended."""
        running = ["squeue", "--noheader", "--jobs", job, "--states=PD,R,CG,CF"]
        wait_until(lambda: not self.call(running), 400)
        return self.field(job, "JobState")

    def output(self, job: str) -> str:
        """What the job, or the array's task, has printed so far."""
        pattern = f"{job}-*.out" if "_" in job else f"*-{job}.out"
        return "".join(path.read_text() for path in self.directory.glob(pattern))


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Jobs end with it, then the daemons."""
    missing = [name for name in _DAEMONS if shutil.which(name, path=_PATH) is None]
    assert not missing, f"{missing} are not installed: sudo bash tools/install_slurm.sh"
    user = getpass.getuser()
    place = TemporaryDirectory(prefix="opsft-slurm-", ignore_cleanup_errors=True)
    with place, ExitStack() as daemons:
        here = Path(place.name)  # short: it holds a socket
        running = SlurmCluster(here)

        def spawn(*command: str) -> None:
            env, nowhere = running.env, {"stdout": DEVNULL, "stderr": DEVNULL}
            daemon = Popen(command, env=env, start_new_session=True, **nowhere)
            daemons.callback(daemon.wait)
            daemons.callback(daemon.kill)

        for name in ("state", *NODES):
            (here / name).mkdir()
        with ExitStack() as held:  # until all are known to be free
            free = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            ports = [each.getsockname()[1] for each in free]
        conf = _CONF.format(host=socket.gethostname(), user=user, directory=here, ports=ports)
        (here / "slurm.conf").write_text(conf)
        (here / "gres.conf").write_text(_GRES)
        key = here / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munge = [f"--{name}-file={here}/munge.{name}" for name in ("pid", "log", "seed", "key")]
        # --force: the directory may lie in one that others can write to.
        spawn("munged", "--foreground", "--force", *munge, f"--socket={here}/munge.socket")
        wait_until((here / "munge.socket").exists, 30)
        spawn("slurmctld", "-D", "-i", "-f", f"{here}/slurm.conf")
        for node in NODES:
            spawn("slurmd", "-D", "-N", node, "-f", f"{here}/slurm.conf")
        idle = ["sinfo", "--noheader", "--states=idle", "-o", "%D"]

        def is_idle() -> bool:
            with suppress(AssertionError):  # slurmctld does not answer yet
                return running.call(idle) == str(len(NODES))
            return False

        wait_until(is_idle, 30)
        yield running
        running.call(["scancel", f"--user={user}"])
        with suppress(AssertionError):
            wait_until(lambda: not running.call(["squeue", "--noheader"]), 30)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def on(nodes: int, ranks: int) -> list[str]:
    """sbatch's options for so many nodes and ranks on each, without GPUs."""
    return [f"--nodes={nodes}", f"--ntasks-per-node={ranks}", "--gpus-per-node=0"]


def test_two_nodes_and_on_them_a_stop_and_a_lost_node(
    cluster: SlurmCluster, cli: ForkedCli
) -> None:
    """Both lead to a requeue and an exact resume: USR1 after the first step, before a checkpoint is
    due, and a node that SLURM takes away later. Undisturbed: what `launch slurm --dry-run` prints.
    """
    undisturbed, disturbed = (cluster.directory / name for name in ("undisturbed", "disturbed"))
    resources = ["--nodes=2", "--ranks-per-node=1", "--gpus-per-node=0", "--dry-run"]
    launch = ["launch", "slurm", QUICKSTART, *SMALL, f"run.dir={undisturbed}", *resources]
    printed = cli.run(launch).stdout
    job = cluster.submit(shlex.split(printed), {"OMP_NUM_THREADS": "1"})
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert [row["step"] for row in read_lines(undisturbed / "metrics.jsonl")] == [*range(1, 9)]
    assert read_json(undisturbed / "manifest.json")["world_size"] == 2
    assert read_json(undisturbed / "summary.json")["steps"] == 8
    assert (undisturbed / "hf/model.safetensors").is_file()
    logs = {path.name: path.read_text() for path in cluster.logs.glob(f"*-undisturbed-{job}/*")}
    assert sorted(logs) == ["node-0.log", "node-1.log"]
    merged = cluster.output(job)
    assert all("\n0: step 8/8  loss" in text for text in (merged, logs["node-0.log"]))
    assert "2 ranks on n[1-2], rendezvous at 127.0.0.1:" in merged
    words = ["sbatch", *on(2, 1), SCRIPT, *SMALL, f"run.dir={disturbed}", "checkpoint.every=2"]
    job = cluster.submit(words, SETTINGS)
    wait_until(lambda: bool(read_lines(disturbed / "metrics.jsonl")))
    cluster.call(["scancel", "--signal=USR1", job])
    wait_until(lambda: cluster.field(job, "Restarts") == "1")
    assert "stopped with a checkpoint, as asked" in cluster.output(job)
    stopped, saved = len(read_lines(disturbed / "metrics.jsonl")), disturbed / "checkpoints"
    assert (saved / f"step_{stopped:06d}").exists() and stopped < 5
    wait_until((saved / f"step_{stopped // 2 * 2 + 2:06d}").exists)
    cluster.call(["scontrol", "update", "nodename=n2", "state=down", "reason=test"])
    wait_until(lambda: cluster.field(job, "Restarts") == "2")
    with suppress(AssertionError):  # its slurmd lives: SLURM may have taken it back by itself
        cluster.call(["scontrol", "update", "nodename=n2", "state=resume"])
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert "DUE TO NODE FAILURE" in cluster.output(job)
    assert cluster.field(job, "Restarts") == "2"
    assert compare_runs(undisturbed, disturbed) == []


def test_every_rank_knows_its_place_and_sees_the_gpus_of_its_node(cluster: SlurmCluster) -> None:
    probe = cluster.directory / "probe.sh"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    names += ("SLURM_CPUS_PER_TASK",)  # of the four of a node
    probe.write_text(f"#!/bin/sh\necho {' '.join(f'${name}' for name in names)} $SLURMD_NODENAME\n")
    probe.chmod(0o755)
    resources = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"]
    job = cluster.submit(["sbatch", *resources, SCRIPT], {**SETTINGS, "PYTHON": str(probe)})
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    logs = [cluster.logs / f"opsft-7b-{job}/node-{node}.log" for node in range(2)]
    lines = [sorted(log.read_text().splitlines()) for log in logs]
    assert lines == [
        ["0: 0 4 0 2 0,1 2 n1", "1: 1 4 1 2 0,1 2 n1"],
        ["2: 2 4 0 2 0,1 2 n2", "3: 3 4 1 2 0,1 2 n2"],
    ]


def test_an_array_s_task_makes_its_run_of_a_study(cluster: SlurmCluster, cli: ForkedCli) -> None:
    """It trains and evaluates on all ranks; the page then says which runs there are."""
    study, out = cluster.directory / "study.yaml", cluster.directory / "study"
    small = dict(word.split("=", 1) for word in [*SMALL_RUN, "run.steps=1"])
    tree = {
        "title": "Array",
        "config": QUICKSTART,
        "set": {key: yaml.safe_load(value) for key, value in small.items() if key != "run.dir"},
        "eval": {"benchmarks": "arithmetic", "limit": 4, "samples": 1, "max_tokens": 32},
        "baseline": "base",
        "sections": {"all": {"title": "All", "runs": {"base": {"train": False}, "ours": {}}}},
    }
    study.write_text(yaml.safe_dump(tree, sort_keys=False))
    settings = {"STUDY": str(study), "OUT": str(out), "VENV": sys.prefix, "OMP_NUM_THREADS": "1"}
    job = cluster.submit(["sbatch", *on(1, 2), "--array=1", "slurm/study.sh"], settings)
    assert cluster.wait(f"{job}_1") == "COMPLETED", cluster.output(f"{job}_1")
    ended = cli.run(["study", study, "--out", out, "--page"])
    assert ended.exit_code == 0, ended.stderr
    rows = read_json(out / "table.json")
    errors = [(row["name"], row["error"]) for row in rows]
    assert errors == [("base", "not made yet"), ("ours", None)]
    assert rows[1]["training"]["steps"] == 1
    assert read_json(out / "runs/ours-s0/train/manifest.json")["world_size"] == 2


def test_scaling_on_one_and_two_nodes(cluster: SlurmCluster, cli: ForkedCli) -> None:
    """One job submits a run for each number of nodes; `report` has them beside the plan."""
    out = cluster.directory / "scaling"
    settings = {**SETTINGS, "NODES": "1 2", "STEPS": "4", "OUT": str(out)}
    words = ["sbatch", "slurm/scaling.sh", *on(1, 1)[1:], QUICKSTART, *SMALL_RUN]
    submitter = cluster.submit(words, settings)
    assert cluster.wait(submitter) == "COMPLETED", cluster.output(submitter)
    *submitted, last = cluster.output(submitter).splitlines()
    assert last.endswith(f"megatron-opsft report {out}")
    for job in (line.rpartition(" ")[2] for line in submitted[:2]):
        assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    for nodes in (1, 2):
        run = out / f"nodes_{nodes}"
        assert read_json(run / "manifest.json")["world_size"] == nodes
        assert len(read_lines(run / "metrics.jsonl")) == 4
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000004"]
    ended = cli.run(["report", out])
    assert ended.exit_code == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines() if line.endswith("%)")]
    assert [row[:2] for row in rows] == [["1", "1"], ["2", "2"]]
    assert "measured (planned for cpu)" in ended.stdout and (out / "report.html").is_file()
