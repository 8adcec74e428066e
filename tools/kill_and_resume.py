"""Kills a run at random moments, resumes it each time, and compares it with an undisturbed one.

    python tools/kill_and_resume.py examples/configs/quickstart.yaml run.steps=6 --kills 10

Every second kill waits for a checkpoint that is being written. What a run wrote must be equal in
every bit: metrics but for the keys that end in `_seconds`, evaluations, rollouts, exported weights.
Prints one JSON line; exits with 1 when anything differs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megatron_opsft.report.differences import compare_runs


def command(args: argparse.Namespace, run_dir: Path, *, resume: bool) -> list[str]:
    """The trainer's command line, through torchrun for several ranks."""
    launcher = [sys.executable, "-m"]
    if args.ranks > 1:
        launcher += [
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={args.ranks}",
            "-m",
        ]
    words = ["megatron_opsft", "train", args.config, *args.overrides, f"run.dir={run_dir}"]
    return launcher + words + ["--resume=auto"] * resume


def start(args: argparse.Namespace, run_dir: Path, *, resume: bool) -> subprocess.Popen:
    log = open(run_dir.with_suffix(".log"), "a", encoding="utf-8")  # noqa: SIM115
    return subprocess.Popen(
        command(args, run_dir, resume=resume), stdout=log, stderr=log, start_new_session=True
    )


def finish(process: subprocess.Popen, run_dir: Path) -> None:
    if code := process.wait():
        log = run_dir.with_suffix(".log").read_text(encoding="utf-8")
        raise SystemExit(f"a run ended with exit code {code}:\n{log[-4000:]}")


def wait_for_moment(process: subprocess.Popen, run_dir: Path, delay: float, at_save: bool) -> str:
    """Until `delay` seconds are over, and then until a checkpoint is being written if `at_save`."""
    deadline = time.monotonic() + delay
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    while at_save and process.poll() is None:
        if any((run_dir / "checkpoints").glob(".partial_*")):
            return "while a checkpoint was being written"
        time.sleep(0.001)
    return f"after {delay:.1f} s"


def last_step(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def disturb(args: argparse.Namespace, run_dir: Path, seconds: float, draw: random.Random) -> int:
    """Start, kill and resume until there were enough kills; the run is not finished afterwards.

    A run that ends before it is killed does not count and is started from the beginning.
    """
    kills = misses = 0
    resume = False
    while kills < args.kills:
        at_save = kills % 2 == 1
        delay = draw.uniform(0.0, 0.3 if at_save else 1.0) * seconds
        process = start(args, run_dir, resume=resume)
        moment = wait_for_moment(process, run_dir, delay, at_save)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            resume = True
            print(f"kill {kills}: {moment}, {last_step(run_dir)} steps recorded", file=sys.stderr)
            continue
        finish(process, run_dir)
        compare_or_exit(args.reference, run_dir)
        misses += 1
        shutil.rmtree(run_dir)
        resume = False
    return misses


def compare_or_exit(reference: Path, run_dir: Path) -> None:
    if differences := compare_runs(reference, run_dir):
        raise SystemExit("\n".join(differences))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as name:
        args.reference = Path(name) / "undisturbed"
        begin = time.monotonic()
        finish(start(args, args.reference, resume=False), args.reference)
        seconds = time.monotonic() - begin
        run_dir = Path(name) / "disturbed"
        misses = disturb(args, run_dir, seconds, random.Random(args.seed))
        finish(start(args, run_dir, resume=True), run_dir)
        compare_or_exit(args.reference, run_dir)
        result = {
            "kills": args.kills,
            "runs_that_ended_before_a_kill": misses,
            "steps": last_step(args.reference),
            "undisturbed_seconds": round(seconds, 1),
            "seconds": round(time.monotonic() - begin, 1),
            "identical": True,
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
