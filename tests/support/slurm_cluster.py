"""A real SLURM cluster of two nodes on this machine: munged, slurmctld, and slurmd twice.

Everything lives in one temporary directory, under the user who runs the tests, on free ports. Other
clusters of the machine, and its own munge, are not touched.
"""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

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


class SlurmCluster:
    """The running cluster, in its directory. Jobs are submitted from the project's root."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {
            **os.environ,
            "PATH": _PATH,
            "SLURM_CONF": str(directory / "slurm.conf"),
            "LOG_DIR": str(directory / "logs"),
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
        running = ["squeue", "--noheader", "--jobs", job, "--states=PD,R,CG,CF"]
        deadline = time.monotonic() + timeout
        while self.call(running):
            assert time.monotonic() < deadline, f"job {job} still runs:\n{self.output(job)}"
            time.sleep(0.2)
        return self.field(job, "JobState")

    def output(self, job: str) -> str:
        """What the job, or the array's task, has printed so far."""
        pattern = f"{job}-*.out" if "_" in job else f"*-{job}.out"
        return "".join(path.read_text() for path in self.directory.glob(pattern))


@contextmanager
def running_cluster() -> Iterator[SlurmCluster]:
    """Jobs end with it, then the daemons."""
    missing = [name for name in _DAEMONS if shutil.which(name, path=_PATH) is None]
    assert not missing, f"{missing} are not installed: sudo bash tools/install_slurm.sh"
    user = getpass.getuser()
    with (
        # Short: it holds a socket.
        TemporaryDirectory(prefix="opsft-slurm-", ignore_cleanup_errors=True) as place,
        ExitStack() as daemons,
    ):
        here, cluster = Path(place), SlurmCluster(Path(place))

        def spawn(*command: str) -> None:
            daemon = subprocess.Popen(
                command,
                env=cluster.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            daemons.callback(_end, daemon)

        for name in ("state", *NODES):
            (here / name).mkdir()
        conf = _CONF.format(host=socket.gethostname(), user=user, directory=here, ports=_ports())
        (here / "slurm.conf").write_text(conf)
        (here / "gres.conf").write_text(_GRES)
        key = here / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munge = [f"--{name}-file={here}/munge.{name}" for name in ("pid", "log", "seed")]
        munge += [f"--key-file={key}", f"--socket={here}/munge.socket"]
        # --force: the directory may lie in one that others can write to.
        spawn("munged", "--foreground", "--force", *munge)
        _wait_for((here / "munge.socket").exists, "munged")
        spawn("slurmctld", "-D", "-i", "-f", f"{here}/slurm.conf")
        for node in NODES:
            spawn("slurmd", "-D", "-N", node, "-f", f"{here}/slurm.conf")
        idle = ["sinfo", "--noheader", "--states=idle", "-o", "%D"]

        def is_idle() -> bool:
            with suppress(AssertionError):  # slurmctld does not answer yet
                return cluster.call(idle) == str(len(NODES))
            return False

        _wait_for(is_idle, "slurmctld and slurmd")
        yield cluster
        cluster.call(["scancel", f"--user={user}"])
        with suppress(AssertionError):
            _wait_for(lambda: not cluster.call(["squeue", "--noheader"]), "the jobs' end")


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(timeout=10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _ports() -> list[int]:
    """Three that are free now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_for(condition: Callable[[], bool], what: str, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not there after {timeout} s: {what}"
        time.sleep(0.1)
