"""Runs the stages of tests/gpu/proof/stages.py by pytest; writes their results as `gpu_proof.json`
and `table.txt`, and with --bundle these and the logs as one file.

Started by tools/gpu_proof.sh, which finds the interpreter and the wheels, and sets PYTHONPATH.
"""

import argparse
import importlib.util
import io
import json
import os
import signal
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from proof.stage import ROOT, Stage, adopt_orphans, formatted
from tabulate import tabulate

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import FullDiskError, write_bytes, write_json

STAGES = ROOT / "tests/gpu/proof/stages.py"
PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"
OUTCOMES = {"passed": PASSED, "failed": FAILED, "skipped": LEFT_OUT}
STOPPED = 128 + signal.SIGTERM
RESULTS = "gpu_proof.json"


class Proof:
    """A plugin of pytest: chooses tests, gives each its `stage`, and keeps what they found.

    results: by the stage's name, of this call and of earlier ones that it goes on from.
    """

    def __init__(self, args: argparse.Namespace, out: Path) -> None:
        self.args, self.out = args, out
        self.began, self.deadline = time.time(), time.monotonic() + 60 * args.minutes
        self.names: list[str] = []
        self.results: dict[str, dict[str, Any]] = {}
        self.error = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests that were asked for. `environment` always: the others ask it for GPUs."""
        self.names = [_name(item) for item in items]
        unknown = [name for name in self.args.only if name not in self.names]
        if unknown:
            known = ", ".join(self.names)
            self._stop(f"--only {unknown[0]}: there is no such stage; there are {known}")
        # A call for all stages begins anew: nothing that an older one found is read.
        goes_on = self.args.only or self.args.go_on is not None
        earlier = self._read(self.args.go_on or self.out / RESULTS) if goes_on else {}
        passed = [name for name, found in earlier.items() if found["outcome"] == PASSED]
        known = [_name(item) for item in items if _needs(item)["quick"] or not self.args.quick]
        wanted = self.args.only or [name for name in known if name not in passed]
        items[:] = [item for item in items if _name(item) in ("environment", *wanted)]
        chosen = [_name(item) for item in items]
        self.results = {name: found for name, found in earlier.items() if name not in chosen}
        self.write()

    def _stop(self, error: str) -> None:
        self.error = error
        pytest.exit(error, returncode=2)

    def _read(self, path: Path) -> dict[str, dict[str, Any]]:
        """The results of an earlier call, by the stage's name; none where OUT has none yet."""
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            device = found["device"]
            stages = {stage["name"]: _earlier_result(stage) for stage in found["stages"]}
        except (OSError, ValueError, KeyError, TypeError):
            self._stop(f"{path} is no {RESULTS} of this version; name another, or set OUT")
        if device != self.args.device:
            self._stop(
                f"{path} holds results of --device {device}, not of {self.args.device}; name "
                "another, or set OUT to another folder"
            )
        return stages

    @pytest.fixture
    def stage(self, request: pytest.FixtureRequest, record_property: Any) -> Stage:
        """What a test runs its command with; skips the test where it cannot be run."""
        needs = _needs(request.node)
        record_property("proves", request.function.__doc__)
        record_property("fix", needs["fix"])
        if reason := self._why_not(needs):
            pytest.skip(reason)
        return Stage(
            name=_name(request.node),
            device=self.args.device,
            out=self.out,
            seconds=min(needs["limit"], self.deadline - time.monotonic()),
            record=record_property,
        )

    def _why_not(self, needs: dict[str, Any]) -> str:
        """Why a stage with these needs is not run here; empty when it is."""
        on_gpu, gpus, gb = self.args.device == "cuda", needs["gpus"], needs["gb"]
        if not (on_gpu or needs["cpu"]):
            return "needs a GPU"
        if missing := [name for name in needs["modules"] if not _is_there(name)]:
            return f"needs {', '.join(missing)}"
        if int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) < needs["nodes"]:
            return f"needs a SLURM job of {needs['nodes']} nodes"
        there = self.results.get("environment", {}).get("figures", {})
        if on_gpu and there.get("gpus", 0) < gpus:
            return "needs a GPU" if gpus == 1 else f"needs {gpus} GPUs"
        if on_gpu and there.get("gpu_memory_gb", 0.0) < gb:
            return f"needs a GPU of {gb:g} GB"
        left = self.deadline - time.monotonic()
        if left < max(needs["seconds"], 1):
            return f"no time: takes about {needs['seconds']:g} s, {max(0, round(left))} s are left"
        return ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has ended: its result is on disk before the next one begins."""
        if report.when != "call" and report.outcome == "passed":
            return
        name = report.nodeid.partition("::test_")[2]
        found = dict(report.user_properties)
        self.results[name] = {
            "name": name,
            "proves": found.pop("proves"),
            "fix": found.pop("fix"),
            "outcome": OUTCOMES[report.outcome],
            "reason": _reason(report),
            "began": report.start,
            "seconds": round(report.duration, 1),
            "figures": {},
            "says": "",
            "details": {},
            **found,
        }
        self.write()
        gpus = self.results[name]["figures"].get("gpus")
        if name == "environment" and self.args.device == "cuda" and gpus == 0:
            why = self.results[name]["details"].get("no_gpu", "")
            self._stop(f"torch sees no GPU here; {why}; --device cpu runs the same, tiny")

    def in_order(self) -> list[dict[str, Any]]:
        """The results as the stages stand in their file."""
        return [self.results[name] for name in self.names if name in self.results]

    def failed(self) -> list[dict[str, Any]]:
        return [found for found in self.in_order() if found["outcome"] == FAILED]

    def left_out(self) -> dict[str, str]:
        """Name -> reason."""
        return {s["name"]: s["reason"] for s in self.in_order() if s["outcome"] == LEFT_OUT}

    def write(self) -> None:
        """All results so far: as JSON to go on from, as a table, and as a bundle."""
        content = {
            "outcome": FAILED if self.failed() else PASSED,
            "device": self.args.device,
            "seconds": round(sum(found["seconds"] for found in self.in_order()), 1),
            "failed": [found["name"] for found in self.failed()],
            "left_out": self.left_out(),
            "machine": self.results.get("environment", {}).get("details", {}),
            "stages": self.in_order(),
        }
        write_json(self.out / RESULTS, content)
        (self.out / "table.txt").write_text(f"{self.table()}\n", encoding="utf-8")
        if self.args.bundle:
            self._write_bundle(self.args.bundle)

    def _write_bundle(self, path: Path) -> None:
        """Pack results and logs into one file, and replace the old one at once: it always holds
        everything up to the last stage that ended. Where it cannot be written the stages go on.
        """
        packed = io.BytesIO()
        top = path.name.partition(".")[0]
        with tarfile.open(fileobj=packed, mode="w:gz") as bundle:
            for name in (RESULTS, "table.txt", "logs"):
                bundle.add(self.out / name, arcname=f"{top}/{name}")
        try:
            write_bytes(path, packed.getvalue())
        except (OSError, FullDiskError) as error:
            print(f"WARNING --bundle {path} cannot be written: {error}", file=sys.stderr)

    def table(self) -> str:
        """One line a stage; `*` marks what an earlier call found."""
        rows = []
        for found in self.in_order():
            name = found["name"] + "*" * (found["began"] < self.began)
            shown = found["reason"]
            if found["outcome"] == PASSED:
                shown = formatted(found["figures"])
            seconds = "" if found["outcome"] == LEFT_OUT else f"{found['seconds']:.1f}"
            rows.append((name, found["outcome"], seconds, shown))
        headings = ("stage", "outcome", "seconds", "figures, or why not")
        align = ("left", "left", "right", "left")
        return tabulate(rows, headings, disable_numparse=True, colalign=align)


def _earlier_result(stage: dict[str, Any]) -> dict[str, Any]:
    """A stage of an earlier call's results. Errors: `KeyError` where it lacks what the table and
    the summary show.
    """
    shown = ("name", "outcome", "reason", "began", "seconds", "figures", "fix")
    return {"says": "", **stage, **{key: stage[key] for key in shown}}


def _name(item: pytest.Item) -> str:
    return item.name.removeprefix("test_")


def _needs(item: Any) -> dict[str, Any]:
    return item.get_closest_marker("gpu").kwargs


def _is_there(package: str) -> bool:
    """Whether a package can be found; only what is above it is imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _reason(report: pytest.TestReport) -> str:
    """Why a test was skipped or failed, in one line; empty where it passed."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr or "")
    return text.removeprefix("Failed: ").partition("\n")[0]


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options, which gpu_proof.sh explains, paths made whole. Errors: `UserError` for bad
    paths.
    """
    parser = argparse.ArgumentParser(prog="gpu_proof.sh")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=[], metavar="STAGE[,STAGE]"
    )
    parser.add_argument("--continue", dest="go_on", nargs="?", const="", metavar="FILE.json")
    parser.add_argument("--bundle", metavar="FILE.tgz")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--minutes", type=float)
    args = parser.parse_args(words)
    caller = Path(os.environ.get("CALLED_FROM", "."))
    if args.go_on:
        args.go_on = caller / args.go_on
        if not args.go_on.is_file():
            raise UserError(f"--continue {args.go_on}: there is no such file")
    if args.bundle:
        args.bundle = caller / args.bundle
        if args.bundle.is_dir() or not os.access(args.bundle.parent, os.W_OK):
            raise UserError(
                f"--bundle {args.bundle} must be a file, in a folder that can be written to"
            )
    args.minutes = args.minutes or (6.0 if args.quick else 34.0)
    return args


def prove(words: Sequence[str], stages: Path) -> int:
    """The exit code: 0 when nothing failed, 1 when something did.

    Errors: `UserError` for bad input and where there is no GPU.
    """
    args = read_options(words)
    out = Path(os.environ.get("OUT") or ROOT / "runs/gpu_proof").resolve()
    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"no results can be written to {out}: {error.strerror}") from error
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("stopped", returncode=STOPPED))
    proof = Proof(args, out)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever is installed here; also in stages
    options = "-vv --noconftest --no-header --tb=no -rN -p no:cacheprovider -p no:warnings"
    code = pytest.main([str(stages), *options.split()], plugins=[proof])
    if proof.error:
        raise UserError(proof.error)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(code)
    print(f"\n{proof.table()}\n")
    if left_out := proof.left_out():
        print(f"left out, so not proved: {', '.join(left_out)}")
    for found in proof.in_order():
        if found["says"]:
            print(f"{found['name']}: {found['says']}")
    for found in proof.failed():
        print(f"FAILED: {found['name']}: {found['reason']}")
        log = out / f"{found.get('log', '')}.err"
        if log.is_file():  # of this call, or of an earlier one in the same folder
            print(f"        see {log}")
        print(f"        {found['fix']}")
    return int(bool(proof.failed()))


def main(stages: Path = STAGES) -> None:
    """Entry point. Bad input: one line on stderr and exit code 2."""
    try:
        sys.exit(prove(sys.argv[1:], stages))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
