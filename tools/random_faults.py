"""Disturbs runs with random faults until there were enough, and checks what each one leads to.

    python tools/random_faults.py examples/configs/quickstart.yaml run.steps=60 \\
        data.prompts_per_step=8 eval.num_problems=8 checkpoint.every=2 --faults 100

Two ranks under `launch local`, in one layout after the other. Every fault must end in
recovery, or in exactly one error line within the configured time; whatever ended is resumed; and
what each run has written in the end must be equal in every bit to what an undisturbed run writes.
Prints a line for each fault and a JSON summary; exits with 1 on any finding.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

from processes import python_path  # noqa: E402
from run_differences import compare_runs  # noqa: E402

PRELUDE = Path(__file__).parent / "fault_prelude"
PATHS = python_path(PRELUDE, PRELUDE.parents[1])
LAYOUTS = {
    "dp2": [],
    "tp2": ["parallel.tp=2", "parallel.sequence_parallel=true"],
    "pp2": ["parallel.pp=2"],
}
SILENCE_SECONDS, HANG_MINUTES = 5, 0.75
LIMIT_SECONDS = 60 * HANG_MINUTES + 60  # of any outcome: the limits, and a restart
WATCHED = "layers: "  # the first thing a run says after its ranks watch each other


class Run:
    """A run under `launch local`, started again as often as it takes."""

    def __init__(self, args: argparse.Namespace, layout: str, run_dir: Path, faults: Path) -> None:
        self.dir, self.faults = run_dir, faults
        self._command = [sys.executable, "-m", "megatron_opsft", "launch", "local", args.config]
        self._command += [*args.overrides, *LAYOUTS[layout], f"run.dir={run_dir}"]
        self._command += [f"run.silence_seconds={SILENCE_SECONDS}"]
        self._command += [f"run.hang_minutes={HANG_MINUTES}", "--ranks=2", "--max-restarts=1000"]
        self.lines: list[str] = []
        self.begin(resume=False)

    def begin(self, *, resume: bool = True) -> None:
        self.process = subprocess.Popen(
            self._command + ["--resume=auto"] * resume,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": PATHS, "OPSFT_FAULTS": str(self.faults)},
        )
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, output: Any) -> None:
        self.lines.extend(line.rstrip("\n") for line in output)

    def end(self) -> int:
        """The exit code, when all output is there."""
        code = self.process.wait()
        self._reader.join()
        return code

    def ranks(self) -> list[psutil.Process]:
        try:
            children = psutil.Process(self.process.pid).children()
            return [child for child in children if "RANK" in child.environ()]
        except psutil.Error:
            return []

    def steps(self) -> int:
        path = self.dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Until it holds; False when the run has ended or the time is over before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            if condition():
                return True
            time.sleep(0.02)
        return False


@dataclass
class Fault:
    """undo: what an administrator would do before the run is resumed."""

    kind: str
    undo: Callable[[], None] = lambda: None


def inject(kind: str, run: Run, draw: random.Random) -> Fault | None:
    """None where there is nothing to disturb just now."""
    ranks = run.ranks()
    if not ranks:
        return None
    try:
        if kind in ("kill", "stop"):
            draw.choice(ranks).send_signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
        elif kind == "term":
            run.process.send_signal(signal.SIGTERM)
        elif kind in ("nan", "stuck"):
            (run.faults / kind).touch()
            return Fault(kind, lambda: (run.faults / kind).unlink(missing_ok=True))
        elif kind == "disk":
            return fill_disk(ranks, draw)
        else:
            return corrupt(run, ranks, draw)
    except (psutil.Error, IndexError, OSError):  # gone in the meantime
        return None
    return Fault(kind)


def fill_disk(ranks: list[psutil.Process], draw: random.Random) -> Fault:
    """The kernel refuses files larger than a drawn size."""
    limit = draw.choice([100, 50_000, 2_000_000])
    for rank in ranks:
        rank.rlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return Fault("disk", lambda: _lift(ranks))


def _lift(ranks: list[psutil.Process]) -> None:
    for rank in ranks:
        if rank.is_running():
            rank.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def corrupt(run: Run, ranks: list[psutil.Process], draw: random.Random) -> Fault:
    """Damage a file of the newest checkpoint and kill a rank, so that it is read."""
    newest = sorted((run.dir / "checkpoints").glob("step_*"))[-1]
    path = draw.choice(sorted(newest.iterdir()))
    content = path.read_bytes()
    how, at = draw.choice(["flip", "cut", "delete"]), draw.randrange(len(content))
    if how == "flip":
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    elif how == "cut":
        path.write_bytes(content[:at])
    else:
        path.unlink()
    draw.choice(ranks).kill()

    def restore() -> None:
        if path.parent.exists():
            path.write_bytes(content)

    return Fault(f"corrupt ({how})", restore)


def outcome(run: Run, fault: Fault, before: int, line: int) -> str:
    """How it ended, or a finding; `before` and `line`: steps and lines of output until then."""
    quiet = fault.kind in ("disk", "nan", "stuck")

    def recovered() -> bool:
        restarted = any("; restart " in text for text in run.lines[line:])
        # A fault that may pass without a restart has been met, or cannot be any more.
        return restarted or (quiet and run.steps() >= before + 3)

    if run.wait(recovered, LIMIT_SECONDS):
        met = not (run.faults / fault.kind).exists()
        fault.undo()
        return "FINDING: nobody has noticed" if met and fault.kind == "nan" else "went on"
    if run.process.poll() is None:
        return "FINDING: no outcome within the limit"
    code = run.end()
    errors = [text for text in run.lines[line:] if text.startswith("error: ")]
    fault.undo()
    if code == 75 and fault.kind == "term":
        return "stopped with a checkpoint"
    if code == 0:
        return "went on to the end"
    if len(errors) != 1:
        return f"FINDING: exit code {code} with {len(errors)} error lines"
    return f"exit code {code}"


def disturb(
    run: Run, kinds: list[str], draw: random.Random
) -> tuple[Fault, float, str, str] | None:
    """One fault: it, seconds until its outcome, outcome and words; None: the run ended before."""
    kind = draw.choice(kinds)
    line = len(run.lines)
    if kind in ("stop", "nan", "stuck", "disk", "corrupt"):
        # Before, ranks cannot see each other, or there is nothing to damage.
        run.wait(lambda: any(WATCHED in text for text in run.lines[line:]), 120)
    run.wait(lambda: False, draw.uniform(0, 8))
    if kind == "corrupt":
        run.wait(lambda: any((run.dir / "checkpoints").glob("step_*")), 60)
    line, before = len(run.lines), run.steps()
    if run.process.poll() is not None or (fault := inject(kind, run, draw)) is None:
        return None
    begin = time.monotonic()
    result = outcome(run, fault, before, line)
    seconds = time.monotonic() - begin
    starts = ("error: ", "WARNING checkpoint", "WARNING cannot")
    words = " | ".join(text[:160] for text in run.lines[line:] if text.startswith(starts))
    return fault, seconds, result, words


def finish(run: Run, reference: Path) -> list[str]:
    """Resume to the end if need be; what differs from the undisturbed run."""
    while code := run.end():
        if code != 75:
            print("\n".join(run.lines[-30:]), file=sys.stderr)
            return [f"the run could not be finished: exit code {code}"]
        run.begin()
    return compare_runs(reference, run.dir)


def undisturbed(args: argparse.Namespace, layout: str, directory: Path) -> Path:
    path = directory / f"undisturbed_{layout}"
    if not path.exists():
        run = Run(args, layout, path, directory / "faults")
        if code := run.end():
            raise SystemExit("\n".join([*run.lines[-30:], f"undisturbed: exit code {code}"]))
        shutil.rmtree(path / "checkpoints")
    return path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="kill,stop,corrupt,disk,nan,stuck,term")
    parser.add_argument("--dir", type=Path, help="where the runs are written; by default temporary")
    return parser.parse_intermixed_args()


def main() -> None:
    args = parse()
    draw = random.Random(args.seed)
    kinds = args.kinds.split(",")
    counts: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    findings: list[str] = []
    runs = 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        directory = Path(name)
        (directory / "faults").mkdir()
        while counts.total() < args.faults:
            layout = list(LAYOUTS)[runs % len(LAYOUTS)]
            reference = undisturbed(args, layout, directory)
            run = Run(args, layout, directory / "disturbed", directory / "faults")
            while run.process.poll() is None and counts.total() < args.faults:
                if (found := disturb(run, kinds, draw)) is None:
                    continue
                fault, seconds, result, words = found
                counts[fault.kind] += 1
                slowest[fault.kind] = max(slowest.get(fault.kind, 0.0), round(seconds, 1))
                number = counts.total()
                print(f"{number} {layout} {fault.kind}: {result} after {seconds:.1f} s: {words}")
                sys.stdout.flush()
                if result.startswith("FINDING"):
                    findings.append(f"fault {number}, {fault.kind}: {result}")
                    print("\n".join(run.lines[-30:]), file=sys.stderr)
                    run.process.kill()
                if run.process.poll() not in (None, 0):
                    run.end()
                    run.begin()
            findings += [f"run {runs}, {layout}: {text}" for text in finish(run, reference)]
            runs += 1
            print(f"run {runs} ({layout}) finished; findings so far: {len(findings)}", flush=True)
            shutil.rmtree(directory / "disturbed")
    summary = {
        "faults": counts.total(),
        "by_kind": dict(sorted(counts.items())),
        "slowest_outcome_seconds": dict(sorted(slowest.items())),
        "runs": runs,
        "seconds": round(time.monotonic() - begin, 1),
        "findings": findings,
    }
    print(json.dumps(summary))
    raise SystemExit(bool(findings))


if __name__ == "__main__":
    main()
