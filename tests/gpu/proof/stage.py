"""What a stage of the proof does: it runs a command with a time limit, and keeps its figures."""

import ctypes
import functools
import importlib.util
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

import psutil
import pytest

ROOT = Path(__file__).parents[3]
# No network. Where the caller's environment says otherwise, it wins.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",  # what it falls back to stands in the stage's log
    "DO_NOT_TRACK": "1",
}
# Images exist that set TF32 to 1, and float32 GEMMs are then not float32's. COLUMNS: pytest cuts
# its reasons off there.
_FIXED = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "COLUMNS": "400"}
# The last line of a traceback, behind torchrun's name of the rank or not.
_NAMES_AN_ERROR = re.compile(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception|Exit|Died)\b.*|error: ")
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_GRACE_SECONDS = 10.0
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(slots=True, kw_only=True)
class Stage:
    """The argument of the tests in stages.py.

    device: cuda or cpu; out: the folder of the results; seconds: where the command is killed;
    record: keeps a value of the result under its name.
    """

    name: str
    device: str
    out: Path
    seconds: float
    record: Callable[[str, Any], None]
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def show_of(self, line: Mapping[str, Any], names: str) -> None:
        """Show those figures of a benchmark's line that are there; bytes as GB."""
        line = dict(line) | {"peak_gb": line.get("peak_bytes", 0) / 1e9}
        self.show(**{name: line.get(name) for name in names.split()})

    def run_on_2_nodes(self, words: str) -> None:
        """As `run`, one rank on each of two nodes of this SLURM job; started by srun."""
        names = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        first, *_ = subprocess.run(names, capture_output=True, text=True).stdout.split()
        srun = "srun --overlap --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1"
        address = f"TMPDIR=/tmp,MASTER_ADDR={first},MASTER_PORT={20000 + os.getpid() % 10000}"
        place = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID"
        as_torchrun = shlex.join(["bash", "-c", f'{place} "$0" "$@"'])
        self.run(words, before=f"{srun} --export=ALL,{address} {as_torchrun}")

    def show(self, **figures: float | None) -> None:
        """Add figures to the table; None: there is none here. Not finite: the stage fails."""
        self.figures |= {name: v for name, v in figures.items() if v is not None}
        wrong = [name for name, v in self.figures.items() if not math.isfinite(float(v))]
        self.record("figures", {n: float(v) for n, v in self.figures.items() if n not in wrong})
        if wrong:
            pytest.fail(f"{wrong[0]} is {self.figures[wrong[0]]}", pytrace=False)

    def run(self, words: str, ranks: int = 1, before: str = "") -> list[dict[str, Any]]:
        """The JSON lines that `python WORDS` prints, started by torchrun for several ranks,
        or by the command `before` it.

        A line with `figures` is a report (`proof.report`): they go to the table. The stage fails
        where the command does, names a problem, or reaches its limit.
        """
        torchrun = "-m torch.distributed.run --standalone --local-addr=localhost --nproc-per-node"
        exit_code = self._run(f"{torchrun} {ranks} {words}" if ranks > 1 else words, before)
        text = self._log("out")
        lines = []
        for line in text.splitlines():
            with suppress(json.JSONDecodeError):
                if line.startswith("{"):
                    lines.append(json.loads(line, parse_constant=str))  # NaN is not JSON
        reports = [line for line in lines if "figures" in line]
        self.record("details", reports[-1].get("details", {}) if reports else {"lines": lines})
        problems = reports[-1]["problems"] if reports else []
        self.record("problems", problems)
        if reports:
            self.show(**reports[-1]["figures"])
        if exit_code or problems:
            end_without_success(problems or [f"exit code {exit_code}: {self._last_words()}"])
        if not lines:
            pytest.fail("it printed no figures", pytrace=False)
        return lines

    def run_tests(self, words: str) -> None:
        """Run `pytest WORDS`: how many tests passed, failed and were skipped, and why; and their
        recorded properties: `says` is a sentence for the user, all others are figures.
        """
        results = self.out / f"logs/{self.name}.xml"
        results.unlink(missing_ok=True)
        junit = f"--junitxml={results} -o junit_family=xunit1"
        exit_code = self._run(f"-m pytest {words} -rfEs -p no:cacheprovider {junit}")
        text = self._log("out")
        (*_, last) = text.strip().splitlines() or [""]
        counts = Counter(passed=0, failed=0, skipped=0)
        for count, outcome in re.findall(r"(\d+) (passed|failed|skipped|error)", last):
            counts["failed" if outcome == "error" else outcome] += int(count)
        problems = re.findall(r"^(?:FAILED|ERROR) (.*)", text, re.MULTILINE)
        problems = [with_reason(problem, text) for problem in problems]
        skipped = re.findall(r"^SKIPPED \[\d+\] \S+: (.*)", text, re.MULTILINE)
        self.record("problems", problems)
        self.record("details", {"skipped": skipped})
        found = ElementTree.parse(results).iter("property") if results.exists() else ()
        properties = {each.get("name", ""): each.get("value", "") for each in found}
        if says := properties.pop("says", ""):
            self.record("says", says)
        self.show(**counts, **{name: float(value) for name, value in properties.items()})
        if exit_code not in (0, 5):  # 5: pytest found no test
            reasons = problems or [self._last_words()]
            end_without_success([f"exit code {exit_code}: {reason}" for reason in reasons])
        if not counts["passed"]:
            pytest.skip("; ".join(dict.fromkeys(skipped)) or "no test ran")

    def _run(self, words: str, before: str = "") -> int:
        """The exit code of `python WORDS`. Whatever it started is gone on return."""
        command = [*shlex.split(before), sys.executable, *shlex.split(words)]
        self.record("command", command)
        self.record("log", f"logs/{self.name}")
        with (
            # A short path: sockets lie below it, whose paths may not be long.
            tempfile.TemporaryDirectory(prefix="opsft-", ignore_cleanup_errors=True) as work,
            open(self.out / f"logs/{self.name}.out", "wb") as out,
            open(self.out / f"logs/{self.name}.err", "wb") as err,
        ):
            environment = {**_ENVIRONMENT, **os.environ, **_FIXED, "TMPDIR": work}
            environment["PROOF_DEVICE"] = self.device
            try:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=environment,
                    cwd=ROOT,
                    start_new_session=True,
                ).wait(self.seconds)
            except subprocess.TimeoutExpired:
                pytest.fail(
                    f"killed after {self.seconds:.0f} s, with all it had started", pytrace=False
                )
            finally:
                end_children()

    def _log(self, suffix: str) -> str:
        path = self.out / f"logs/{self.name}.{suffix}"
        return path.read_text(encoding="utf-8", errors="replace")

    def _last_words(self) -> str:
        """The last error that its log names, or its last line; at most 300 characters."""
        lines = self._log("err").strip().splitlines()
        errors = [line for line in lines if _NAMES_AN_ERROR.match(line)]
        # What torchrun says of a rank that failed comes last, and has no reason.
        errors = [line for line in errors if "ChildFailedError" not in line] or errors
        (*_, last) = errors or lines or ["it said nothing"]
        return last.strip()[:300]


def with_reason(problem: str, text: str) -> str:
    """Add the error to a line of pytest's summary. For a file that cannot be imported the summary
    lacks it; it stands in the section `ERROR collecting FILE` of pytest's output.
    """
    section = rf"ERROR collecting \S*{re.escape(Path(problem).name)} .*?^E   (.*?)$"
    found = re.search(section, text, re.DOTALL | re.MULTILINE)
    return f"{problem} - {found[1]}" if found else problem


@functools.cache
def packages_of_others() -> frozenset[str]:
    """Names under which the packages of a GPU run are imported, as far as their names tell."""
    pins = (ROOT / "constraints/gpu-py312.txt").read_text(encoding="utf-8")
    names = re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)
    imported = {name.lower().replace("-", "_").partition(".")[0] for name in names}
    return frozenset(imported | {"antlr4", "google", "megatron", "PIL", "yaml"})


def missing_package(reason: str) -> str:
    """Name of the package that is not installed, where that is the error; else "".

    A package that lacks one of its own modules is broken, or of another version; a missing module
    of this project is a fault of this project.
    """
    found = _NO_MODULE.search(reason)
    if found is None or found[1] not in packages_of_others():
        return ""
    return found[1] if importlib.util.find_spec(found[1]) is None else ""


def end_without_success(reasons: Sequence[str]) -> NoReturn:
    """Leave the stage out where every reason is a package that this machine lacks: that proves
    nothing about the project. Otherwise it fails, for the first of the other reasons.
    """
    packages = {reason: missing_package(reason) for reason in reasons}
    if all(packages.values()):
        pytest.skip(f"needs {', '.join(sorted(set(packages.values())))}")
    pytest.fail(next(r for r, package in packages.items() if not package), pytrace=False)


def adopt_orphans() -> None:
    """A process whose parent dies becomes a child of this one, and is found and ended with it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """Kill every process below this one, also those in sessions of their own."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while (found := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=1)


def formatted(figures: Mapping[str, float]) -> str:
    """Such as `passed 40, failed 0, mfu 0.41`."""
    return ", ".join(
        f"{name} {value:,.4g}" if value < 1e4 else f"{name} {value:,.0f}"
        for name, value in figures.items()
    )


def publish(
    figures: Mapping[str, float], problems: Sequence[str], details: Mapping[str, Any]
) -> NoReturn:
    """Print the JSON line that `Stage.run` reads, and end: with 1 for any problem."""
    print(json.dumps({"figures": figures, "problems": problems, "details": details}), flush=True)
    sys.exit(bool(problems))
