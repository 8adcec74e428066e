"""Kills a study at random moments, starts it again each time, and compares it with an undisturbed
one.

    python tools/kill_study.py examples/studies/tiny_quick.yaml --kills 5

Table and page must be equal in every byte, but for seconds and memory: what the runs wrote down of
those is made equal before both are written again. Prints one JSON line; exits with 1 when anything
differs.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kill_and_resume import finish, kill

MEASURED = re.compile(r'("(?:\w*seconds|peak_memory_bytes)": )[0-9.e+-]+')
FILES = ("table.json", "report.html")


def start(study: str, out: Path, *options: str) -> subprocess.Popen:
    """The command, all over again or where it was."""
    words = ["megatron_opsft", "study", study, "--out", str(out), *options]
    log = open(out.with_suffix(".log"), "a", encoding="utf-8")  # noqa: SIM115
    return subprocess.Popen([sys.executable, "-m", *words], stdout=log, stderr=log)


def disturb(args: argparse.Namespace, out: Path, seconds: float) -> None:
    """Start and kill so often. No start is long enough to finish what those before it have left."""
    draw = random.Random(args.seed)
    for number in range(1, args.kills + 1):
        process = start(args.study, out)
        delay = draw.uniform(0.2, 1.0) * seconds / args.kills
        time.sleep(delay)
        if process.poll() is not None:
            raise SystemExit(f"the study ended within {delay:.1f} s, before kill {number}")
        kill(process)
        done = len(list(out.glob("runs/*/eval/results.json")))
        print(f"kill {number}: after {delay:.1f} s, {done} runs finished", file=sys.stderr)


def without_measurements(args: argparse.Namespace, out: Path) -> dict[str, str]:
    """Table and page, with every second and byte of memory 1."""
    for path in (*out.glob("runs/**/metrics.jsonl"), *out.glob("runs/**/summary.json")):
        text = path.read_text(encoding="utf-8")
        path.write_text(MEASURED.sub(r"\g<1>1", text), encoding="utf-8")
    finish(start(args.study, out, "--page"), out)
    return {name: (out / name).read_text(encoding="utf-8") for name in FILES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "study"
        begin = time.monotonic()
        finish(start(args.study, out), out)
        seconds = time.monotonic() - begin
        expected = without_measurements(args, out)
        out.rename(Path(name) / "undisturbed")  # both are made in one place, which they may name
        begin = time.monotonic()
        disturb(args, out, seconds)
        finish(start(args.study, out), out)
        found = without_measurements(args, out)
        result = {
            "kills": args.kills,
            "rows": len(json.loads(expected["table.json"])),
            "undisturbed_seconds": round(seconds, 1),
            "disturbed_seconds": round(time.monotonic() - begin, 1),
            **{f"{name} is the same": expected[name] == found[name] for name in FILES},
        }
        print(json.dumps(result))
        sys.exit(expected != found)


if __name__ == "__main__":
    main()
