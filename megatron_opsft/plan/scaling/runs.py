"""Real runs of a sweep, one after the other on this machine, through torchrun."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_opsft.errors import UserError
from megatron_opsft.plan.scaling.sweep import Case


def start_run(config: Path, case: Case, run_dir: Path, overrides: Sequence[str]) -> None:
    """Train to the end; a run that is there is gone on with, and a finished one is left as it is.

    Its output goes to RUN_DIR.log. Errors: `UserError` naming the log, where the run fails.
    """
    if (run_dir / "summary.json").is_file():
        return
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(case.ranks), "-m", "megatron_opsft", "train", str(config)),
        *(*overrides, *case.overrides, f"run.dir={run_dir}", "--resume"),
    ]
    log = run_dir.with_name(run_dir.name + ".log")
    with open(log, "a", encoding="utf-8") as output:
        code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    if code:
        raise UserError(f"{case.name}: the run ended with exit code {code}; see {log}")
