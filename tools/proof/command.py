"""The command line of the proof, its table and `gpu_proof.json`."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import write_json
from proof.commands import Stage
from proof.processes import adopt_orphans
from proof.readings import formatted
from proof.runner import (
    FAILED,
    LEFT_OUT,
    PASSED,
    ROOT,
    Machine,
    Result,
    Settings,
    result_file,
    results_on_disk,
    run_stages,
)
from proof.stages import STAGES

SUMMARY = "gpu_proof.json"


def parse(words: Sequence[str], stages: Sequence[Stage]) -> argparse.Namespace:
    """Errors: `UserError` for a stage that there is not."""
    parser = argparse.ArgumentParser(
        prog="gpu_proof.sh", description="Proves on this machine's GPUs what was built without."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", metavar="STAGE[,STAGE]", help="these stages; others keep theirs")
    parser.add_argument(
        "--continue", dest="go_on", action="store_true", help="all stages that have not passed yet"
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="for all stages together")
    parser.add_argument("--list", action="store_true", help="name the stages, run none")
    args = parser.parse_args(words)
    args.only = args.only.split(",") if args.only else []
    names = [stage.name for stage in stages]
    for name in args.only:
        if name not in names:
            raise UserError(f"--only {name}: there is no such stage; there are {', '.join(names)}")
    return args


def chosen(
    args: argparse.Namespace, stages: Sequence[Stage], earlier: Sequence[Result]
) -> list[tuple[int, Stage]]:
    """The stages to run, by number. `environment` always: the others ask it for GPUs."""
    passed = {result.name for result in earlier if result.outcome == PASSED}
    return [
        (number, stage)
        for number, stage in enumerate(stages, 1)
        if stage.name == "environment"
        or (stage.name in args.only if args.only else not (args.go_on and stage.name in passed))
    ]


def machine_of(result: Result) -> Machine:
    """What the stage `environment` found."""
    figures = result.figures
    return Machine(
        gpus=int(figures.get("gpus", 0)), gpu_gb=float(figures.get("gpu_memory_gb", 0.0))
    )


def summary(results: Sequence[Result], device: str) -> dict[str, Any]:
    """The content of gpu_proof.json."""
    return {
        "outcome": FAILED if any(result.is_failure for result in results) else PASSED,
        "device": device,
        "seconds": round(sum(result.seconds for result in results), 1),
        "failed": [result.name for result in results if result.is_failure],
        "left_out": {r.name: r.reason for r in results if r.outcome == LEFT_OUT},
        "machine": next((r.details for r in results if r.name == "environment"), {}),
        "stages": [asdict(result) for result in results],
    }


def table(results: Sequence[Result], began: float) -> str:
    """One line a stage; `*` marks what an earlier call found."""
    rows = [("stage", "outcome", "seconds", "figures, or why not")]
    for result in results:
        earlier = "*" * (result.began < began)
        shown = formatted(result.figures) if result.outcome == PASSED else result.reason
        seconds = "" if result.outcome == LEFT_OUT else f"{result.seconds:.1f}"
        rows.append((f"{result.number:2d} {result.name}{earlier}", result.outcome, seconds, shown))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{name:<{widths[0]}}  {outcome:<{widths[1]}}  {seconds:>{widths[2]}}  {shown}".rstrip()
        for name, outcome, seconds, shown in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def prove(words: Sequence[str], stages: Sequence[Stage]) -> int:
    """The exit code: 0 when nothing failed, 1 when something did.

    Errors: `UserError` for bad input and where there is no GPU.
    """
    args = parse(words, stages)
    if args.list:
        print("\n".join(f"{stage.name:<20}{stage.proves}" for stage in stages))
        return 0
    began, started = time.time(), time.monotonic()
    out = Path(os.environ.get("OUT") or ROOT / "runs/gpu_proof").resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"no results can be written to {out}: {error.strerror}") from error
    # A call for all stages begins anew: nothing that an older one found is read.
    earlier = results_on_disk(out, stages) if args.only or args.go_on else []
    if any(result.device != args.device for result in earlier):
        raise UserError(f"{out} holds results of another device; set OUT to another folder")
    numbered = chosen(args, stages, earlier)
    (out / SUMMARY).unlink(missing_ok=True)
    for number, stage in numbered:
        result_file(out, number, stage.name).unlink(missing_ok=True)

    def tell(result: Result) -> None:
        write_json(out / SUMMARY, summary(results_on_disk(out, stages), args.device))
        how = f": {result.reason}" if result.reason else f" ({result.seconds:.0f} s)"
        print(
            f"[{result.number:2d}/{len(stages)}] {result.name}: {result.outcome}{how}", flush=True
        )
        if args.device == "cuda" and result.figures.get("gpus") == 0:
            raise UserError("torch sees no GPU here; --device cpu runs the same with tiny shapes")

    settings = Settings(out=out, device=args.device, deadline=started + 60 * args.minutes)
    run_stages(numbered, settings, tell, machine_of)
    results = results_on_disk(out, stages)
    print(f"\n{table(results, began)}\n")
    return conclude(results, out)


def conclude(results: Sequence[Result], out: Path) -> int:
    """Say what failed and what was left out; the exit code."""
    failed = [result for result in results if result.is_failure]
    left_out = [result.name for result in results if result.outcome == LEFT_OUT]
    if left_out:
        print(f"left out, so not proved: {', '.join(left_out)}")
    for result in failed:
        print(f"FAILED: {result.name}: {result.reason}\n        see {out / result.logs[1]}")
    print(f"{out / SUMMARY}")
    return 1 if failed else 0


def main() -> None:
    """Entry point. Bad input: one line on stderr and exit code 2."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(prove(sys.argv[1:], STAGES))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
