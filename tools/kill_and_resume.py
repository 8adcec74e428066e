"""Kills a run at random moments, resumes it each time, and compares it with an undisturbed one.

    python tools/kill_and_resume.py examples/configs/quickstart.yaml run.steps=6 --kills 10
    python tools/kill_and_resume.py CONFIG --kills 4 --ranks 4 --layout parallel.tp=2 \
        --other-ranks 2 --other-layout parallel.pp=2

Every second kill waits for a checkpoint that is being written. What a run wrote must be equal in
every bit: metrics but for the keys that end in `_seconds`, evaluations, rollouts, exported weights.
With another layout every second start is in that one; the losses must then be the same but for
rounding. Prints one JSON line; exits with 1 when anything differs.
"""

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from megatron_opsft.report.differences import compare_runs

ROUNDING = 1e-4  # of losses in another layout


def command(args: argparse.Namespace, run_dir: Path, number: int) -> list[str]:
    """The trainer's command line of a start, through torchrun for several ranks."""
    ranks, layout = args.layouts[number % len(args.layouts)]
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    words = ["megatron_opsft", "train", args.config, *args.overrides, *layout, f"run.dir={run_dir}"]
    return launcher + words + ["--resume=auto"] * (number > 0)


def start(args: argparse.Namespace, run_dir: Path, number: int = 0) -> subprocess.Popen:
    """number: 0 begins, the others resume."""
    log = open(run_dir.with_suffix(".log"), "a", encoding="utf-8")  # noqa: SIM115
    return subprocess.Popen(command(args, run_dir, number), stdout=log, stderr=log)


def kill(process: subprocess.Popen) -> None:
    """With all ranks, which torchrun starts in sessions of their own."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=30)


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


def disturb(
    args: argparse.Namespace, run_dir: Path, seconds: float, draw: random.Random
) -> tuple[int, int]:
    """Start, kill and resume until there were enough kills; the run is not finished afterwards.

    A run that ends before it is killed does not count and is started from the beginning. Returns
    how many did, and the number of the next start.
    """
    kills = misses = number = 0
    while kills < args.kills:
        at_save = kills % 2 == 1
        delay = draw.uniform(0.0, 0.3 if at_save else 1.0) * seconds
        process = start(args, run_dir, number)
        moment = wait_for_moment(process, run_dir, delay, at_save)
        if process.poll() is None:
            kill(process)
            kills += 1
            number += 1
            print(f"kill {kills}: {moment}, {last_step(run_dir)} steps recorded", file=sys.stderr)
            continue
        finish(process, run_dir)
        compare_or_exit(args, run_dir)
        misses += 1
        shutil.rmtree(run_dir)
        number = 0
    return misses, number


def compare_or_exit(args: argparse.Namespace, run_dir: Path) -> float:
    """The largest relative difference of a loss; 0 where all must be equal in every bit."""
    if len(args.layouts) == 1:
        if differences := compare_runs(args.reference, run_dir):
            raise SystemExit("\n".join(differences))
        return 0.0
    expected, found = (losses(directory) for directory in (args.reference, run_dir))
    worst = max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True) if a)
    if worst > ROUNDING:
        raise SystemExit(f"losses {found} instead of {expected}")
    return worst


def losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layout", nargs="*", default=[], help="keys of parallel")
    parser.add_argument("--other-ranks", type=int, help="of every second start")
    parser.add_argument("--other-layout", nargs="*", default=[], help="and its keys of parallel")
    args = parser.parse_intermixed_args()
    args.layouts = [(args.ranks, args.layout)]
    if args.other_ranks:
        args.layouts.append((args.other_ranks, args.other_layout))
    with tempfile.TemporaryDirectory() as name:
        args.reference = Path(name) / "undisturbed"
        begin = time.monotonic()
        finish(start(args, args.reference), args.reference)
        seconds = time.monotonic() - begin
        run_dir = Path(name) / "disturbed"
        misses, number = disturb(args, run_dir, seconds, random.Random(args.seed))
        finish(start(args, run_dir, number), run_dir)
        worst = compare_or_exit(args, run_dir)
        result = {
            "kills": args.kills,
            "runs_that_ended_before_a_kill": misses,
            "steps": last_step(args.reference),
            "undisturbed_seconds": round(seconds, 1),
            "seconds": round(time.monotonic() - begin, 1),
            "identical": len(args.layouts) == 1,
            "largest_difference_of_a_loss": worst,
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
