"""A real SLURM cluster of two nodes on this machine: munged, slurmctld, and slurmd twice.

Everything lives in one temporary directory, under the user who runs the tests, on free ports. Other
clusters of the machine, and its own munge, are not touched.
"""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from forked_cli import ROOT

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


def missing_programs() -> list[str]:
    """What of SLURM and munge is not installed."""
    return [name for name in _DAEMONS if shutil.which(name, path=_PATH) is None]


class SlurmCluster:
    """The running cluster: a context. Jobs are submitted from the project's root."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="opsft-slurm-"))  # short: it holds a socket
        self._daemons: list[subprocess.Popen] = []
        self.environment = {
            **os.environ,
            "PATH": _PATH,
            "SLURM_CONF": str(self.directory / "slurm.conf"),
            "LOG_DIR": str(self.directory / "logs"),
        }

    def call(self, command: Sequence[str], **settings: str) -> str:
        """Standard output of a program that must succeed; settings: environment variables."""
        ended = subprocess.run(
            command,
            env={**self.environment, **settings},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
        return ended.stdout.strip()

    def submit(self, command: Sequence[str], settings: Mapping[str, str]) -> str:
        """sbatch's command line, with the job's output in `output`; the job's id."""
        return self.call(command, **settings, SBATCH_OUTPUT=str(self.directory / "%A_%a-%j.out"))[
            len("Submitted batch job ") :
        ]

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`, such as JobState, Restarts, or ExitCode."""
        fields = self.call(["scontrol", "show", "job", "--oneliner", job]).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)[name]

    def wait(self, job: str, timeout: float = 400) -> str:
        """The state in which the job ended."""
        deadline = time.monotonic() + timeout
        while self.call(["squeue", "--noheader", "--jobs", job, "--states=all", "-o", "%t"]) in (
            "PD",
            "R",
            "CG",
            "CF",
        ):
            assert time.monotonic() < deadline, f"job {job} still runs:\n{self.output(job)}"
            time.sleep(0.2)
        return self.field(job, "JobState")

    def output(self, job: str) -> str:
        """What the job, or the array's task, has printed so far."""
        pattern = f"{job}-*.out" if "_" in job else f"*-{job}.out"
        return "".join(path.read_text() for path in self.directory.glob(pattern))

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self._stop)
            self._start()
            undo.pop_all()
        return self

    def _start(self) -> None:
        here = self.directory
        (here / "state").mkdir()
        for node in NODES:
            (here / node).mkdir()
        conf = here / "slurm.conf"
        conf.write_text(
            _CONF.format(
                host=socket.gethostname(), user=getpass.getuser(), directory=here, ports=_ports()
            )
        )
        (here / "gres.conf").write_text(_GRES)
        key = here / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munge = [f"--{name}-file={here}/munge.{name}" for name in ("pid", "log", "seed")]
        munge += [f"--key-file={key}", f"--socket={here}/munge.socket"]
        # --force: the directory may lie in one that others can write to.
        self._spawn(["munged", "--foreground", "--force", *munge])
        _wait_for(lambda: (here / "munge.socket").exists(), "munged")
        self._spawn(["slurmctld", "-D", "-i", "-f", str(conf)])
        for node in NODES:
            self._spawn(["slurmd", "-D", "-N", node, "-f", str(conf)])
        _wait_for(self._is_idle, "slurmctld and slurmd")

    def _spawn(self, command: Sequence[str]) -> None:
        with open(self.directory / f"daemon-{len(self._daemons)}.log", "w") as log:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.environment, stdout=log, stderr=log, start_new_session=True
                )
            )

    def _is_idle(self) -> bool:
        ended = subprocess.run(
            ["sinfo", "--noheader", "--states=idle", "-o", "%D"],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        return ended.stdout.strip() == str(len(NODES))

    def __exit__(self, *unused: object) -> None:
        self._stop()

    def _stop(self) -> None:
        """End the jobs, then the daemons, each by its process id."""
        if len(self._daemons) > 1:
            self.call(["scancel", f"--user={getpass.getuser()}"])
            with contextlib.suppress(AssertionError):
                _wait_for(lambda: not self.call(["squeue", "--noheader"]), "the jobs' end")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def _ports() -> list[int]:
    """Three that are free now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_for(condition: Callable[[], bool], what: str, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not there after {timeout} s: {what}"
        time.sleep(0.1)
