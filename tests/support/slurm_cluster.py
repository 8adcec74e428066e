"""A real SLURM cluster of three nodes: munged, slurmctld, and slurmd three times, in one temporary
directory, under the user who runs the tests, on free ports. Other clusters of the machine, and its
own munge, are not touched.
"""

import getpass
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, Popen, run
from tempfile import TemporaryDirectory

from forked_cli import ROOT
from processes import free_ports, wait_until

QUICKSTART = "examples/configs/quickstart.yaml"
SCRIPT = "slurm/train_7b.sh"
SETTINGS = {"CONFIG": QUICKSTART, "VENV": sys.prefix, "OMP_NUM_THREADS": "1"}
NODES = ("n1", "n2", "n3")
_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

# cred_expire: a requeued job waits so long before it may start; 5 is the least that SLURM takes.
# KillWait: from SIGTERM to SIGKILL. Weight: jobs get the nodes in this order. The first, where a
# job's script runs, has more CPUs than the others.
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
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=6 Gres=gpu:2 Weight=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 Gres=gpu:2 Weight=2
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=4 Gres=gpu:2 Weight=3
PartitionName=test Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP
"""
# Devices that stand for GPUs: SLURM counts and hands them out, and looks no further.
_GRES = """\
NodeName=n[1-3] Name=gpu File=/dev/null
NodeName=n[1-3] Name=gpu File=/dev/zero
"""


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


@contextmanager
def running_cluster() -> Iterator[SlurmCluster]:
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
        host, ports = socket.gethostname(), free_ports(1 + len(NODES))
        conf = _CONF.format(host=host, user=user, directory=here, ports=ports)
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


def on(nodes: int, ranks: int) -> list[str]:
    """sbatch's options for so many nodes and ranks on each, without GPUs."""
    return [f"--nodes={nodes}", f"--ntasks-per-node={ranks}", "--gpus-per-node=0"]
