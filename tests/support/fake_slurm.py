"""Stand-ins for the commands that the job scripts call: for tests without a cluster.

`srun` starts one rank, `scontrol` answers for a node and a job, and `python` ends with the next of
a given list of exit codes. What they were asked for is in the folder's `calls`, one line each.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from forked_cli import ROOT, Finished

_COMMANDS = {
    "srun": """
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURMD_NODENAME=n1
while [[ $1 == --* ]]; do shift; done
exec "$@"
""",
    "scontrol": """
case "$1 $2" in
  "show hostnames") echo n1 ;;
  "show node") echo "NodeName=n1 NodeAddr=192.0.2.7 State=ALLOCATED" ;;
  "show job") echo "JobId=$4 JobState=$FAKE_JOB_STATE Restarts=0" ;;
esac
""",
    "python": """
code=$(head -n 1 "$FAKE_FOLDER/codes")
sed -i 1d "$FAKE_FOLDER/codes"
place="$RANK of $WORLD_SIZE at $MASTER_ADDR"
echo "$SRUN_CPUS_PER_TASK CPUs, $OMP_NUM_THREADS threads" >> "$FAKE_FOLDER/cpus"
echo "$place through ${GLOO_SOCKET_IFNAME:-any}" >> "$FAKE_FOLDER/ranks"
echo "$VLLM_CACHE_ROOT $TRITON_CACHE_DIR $TORCHINDUCTOR_CACHE_DIR $FLASHINFER_WORKSPACE_BASE" \
  >> "$FAKE_FOLDER/caches"
exit "$code"
""",
    "apptainer": """
while [[ $1 != *.sif ]]; do shift; done
shift
exec "$@"
""",
}


class FakeSlurm:
    """A folder with the commands; `run` is what SLURM does with a submitted script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for name, body in _COMMANDS.items():
            path = folder / "bin" / name
            note = f'echo "{name} $*" >> "$FAKE_FOLDER/calls"'
            path.write_text(f"#!/usr/bin/env bash\nset -eu\n{note}\n{body}")
            path.chmod(0o755)
        shutil.copy(folder / "bin/python", folder / "bin/python3")

    def run(
        self,
        script: str,
        arguments: Sequence[str] = (),
        codes: Sequence[int] = (0,),
        state: str = "RUNNING",
        **settings: str,
    ) -> Finished:
        """Run a copy of slurm/`script` elsewhere, as SLURM does; `codes`: of its ranks' starts."""
        spooled = self.folder / "slurm_script"
        shutil.copy(ROOT / "slurm" / script, spooled)
        (self.folder / "codes").write_text("".join(f"{code}\n" for code in codes))
        environment = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "FAKE_FOLDER": str(self.folder),
            "FAKE_JOB_STATE": state,
            "SLURM_JOB_ID": "41",
            "SLURM_JOB_NAME": "job",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS": "1",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "LOG_DIR": str(self.folder / "logs"),
            "TMPDIR": str(self.folder),
            "PYTHON": "python",
        }
        ended = subprocess.run(
            ["bash", str(spooled), *arguments],
            env=environment | settings,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Finished(exit_code=ended.returncode, stdout=ended.stdout, stderr=ended.stderr)

    def calls(self, command: str) -> list[str]:
        """The command lines with which this command was called."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if line.split(" ", 1)[0] == command]
