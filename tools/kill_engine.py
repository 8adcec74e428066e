"""Kills the separate rollout engine of a run again and again, and compares the run with another.

    python tools/kill_engine.py examples/configs/quickstart.yaml run.steps=12 --kills 10

Each kill (-9) comes at a random moment of a step, after the run has recorded one since the last
kill. The run has to go on by itself, and what it writes must be equal in every bit to what an
undisturbed run writes: metrics but for the keys that end in `_seconds`, evaluations, rollouts,
exported weights. Prints one JSON line; exits with 1 when anything differs.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from megatron_opsft.report.differences import compare_runs, read_lines


def start(args: argparse.Namespace, run_dir: Path) -> subprocess.Popen:
    """A run with a separate engine; its output goes to a file beside its directory."""
    launcher = [sys.executable, "-m"]
    if args.ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        launcher += ["-m"]
    words = ["megatron_opsft", "train", args.config, *args.overrides, f"run.dir={run_dir}"]
    words += ["rollout.engine=vllm", "rollout.placement=separate"]
    log = open(run_dir.with_suffix(".log"), "a", encoding="utf-8")  # noqa: SIM115
    return subprocess.Popen(launcher + words, stdout=log, stderr=log)


def finish(run: subprocess.Popen, run_dir: Path) -> None:
    if code := run.wait():
        log = run_dir.with_suffix(".log").read_text(encoding="utf-8")
        raise SystemExit(f"a run ended with exit code {code}:\n{log[-4000:]}")


def engines(run: subprocess.Popen) -> list[psutil.Process]:
    """The engine processes of a run, which any of its ranks may have started."""
    try:
        children = psutil.Process(run.pid).children(recursive=True)
        return [p for p in children if "megatron_opsft.rollout.remote.process" in p.cmdline()]
    except psutil.Error:  # something ended while it was looked at
        return []


def disturb(args: argparse.Namespace, run: subprocess.Popen, run_dir: Path) -> int:
    """Kill until there were enough kills or the run has ended; how many there were."""
    draw = random.Random(args.seed)
    kills = recorded = 0
    while kills < args.kills and run.poll() is None:
        rows = read_rows(run_dir)
        if len(rows) <= recorded:
            time.sleep(0.02)
            continue
        recorded = len(rows)
        time.sleep(draw.uniform(0.0, rows[0]["step_seconds"]))
        if found := engines(run):
            draw.choice(found).kill()
            kills += 1
            print(f"kill {kills} after step {recorded}", file=sys.stderr)
    return kills


def read_rows(run_dir: Path) -> list[dict[str, float]]:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # the last one may be half written
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as name:
        reference, disturbed = Path(name) / "undisturbed", Path(name) / "disturbed"
        begin = time.monotonic()
        finish(start(args, reference), reference)
        undisturbed_seconds = time.monotonic() - begin
        run = start(args, disturbed)
        kills = disturb(args, run, disturbed)
        finish(run, disturbed)
        if differences := compare_runs(reference, disturbed):
            raise SystemExit("\n".join(differences))
        result = {
            "kills": kills,
            "steps": len(read_lines(reference / "metrics.jsonl")),
            "undisturbed_seconds": round(undisturbed_seconds, 1),
            "seconds": round(time.monotonic() - begin - undisturbed_seconds, 1),
            "identical": True,
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
