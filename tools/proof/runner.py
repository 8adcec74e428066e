"""Runs stages one after the other; each one's result is on disk before the next begins."""

import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import write_json
from proof.commands import Command, Place, Stage
from proof.processes import Ended, run_limited
from proof.readings import Reading, strict

ROOT = Path(__file__).parents[2]
PASSED, FAILED, TIMED_OUT, LEFT_OUT = "passed", "failed", "timed out", "left out"
# No network. Where the caller's environment says otherwise, it wins.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
# Images exist that set it to 1, and float32 products are then not float32's.
_FIXED = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}

# The last line of a traceback, behind torchrun's name of the rank or not.
_NAMES_AN_ERROR = re.compile(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception|Exit|Died)\b.*|error: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a stage ended. began: seconds since 1970; reason: empty where it passed."""

    number: int
    name: str
    device: str
    proves: str
    outcome: str
    reason: str = ""
    began: float
    seconds: float = 0.0
    exit_code: int | None = None
    command: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)

    @property
    def is_failure(self) -> bool:
        return self.outcome in (FAILED, TIMED_OUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What stages ask of a machine: how many GPUs there are, and the memory of the smallest."""

    gpus: int = 0
    gpu_gb: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """out: where results go. deadline: of `time.monotonic()`, for all stages together."""

    out: Path
    device: str
    deadline: float
    python: str = sys.executable


def result_file(out: Path, number: int, name: str) -> Path:
    """Where the result of a stage is."""
    return out / f"stage_{number:02d}_{name}.json"


def read_result(path: Path) -> Result | None:
    """A result that an earlier call left, if it did.

    Errors: `UserError` for one of another version of this program.
    """
    if not path.exists():
        return None
    try:
        return Result(**json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is no result of this version; remove it") from error


def is_there(package: str) -> bool:
    """Whether a top-level package can be found; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def why_not(command: Command | None, machine: Machine, seconds_left: float) -> str:
    """Why a command is not run here; empty when it is."""
    if command is None:
        return "needs a GPU"
    missing = [name for name in command.modules if not is_there(name)]
    if missing:
        return f"needs {', '.join(missing)}"
    if machine.gpus < command.gpus:
        return "needs a GPU" if command.gpus == 1 else f"needs {command.gpus} GPUs"
    if machine.gpu_gb < command.gpu_gb:
        return f"needs a GPU of {command.gpu_gb:g} GB"
    if seconds_left < max(command.expected_seconds, 1):
        left = max(0, round(seconds_left))
        return f"no time: takes about {command.expected_seconds:g} s, {left} s are left"
    return ""


def run_stage(number: int, stage: Stage, machine: Machine, settings: Settings) -> Result:
    """Run it, or say why not; the result is on disk on return."""
    command = stage.on_cpu if settings.device == "cpu" else stage.on_gpu
    began = time.time()
    left = settings.deadline - time.monotonic()
    about: dict[str, Any] = {
        "number": number,
        "name": stage.name,
        "device": settings.device,
        "proves": stage.proves,
        "began": began,
    }
    if reason := why_not(command, machine, left):
        result = Result(outcome=LEFT_OUT, reason=reason, **about)
    else:
        assert command is not None
        result = _run(command, min(command.limit_seconds, left), settings, about)
    write_json(result_file(settings.out, number, stage.name), asdict(result))
    return result


def _run(command: Command, limit: float, settings: Settings, about: dict[str, Any]) -> Result:
    logs = settings.out / "logs" / f"stage_{about['number']:02d}_{about['name']}"
    logs.parent.mkdir(exist_ok=True)
    # Short: sockets lie below it, whose paths may not be long.
    place = Place(logs=logs, work=Path(tempfile.mkdtemp(prefix="opsft-")))
    filled = {"work": place.work, "device": settings.device}
    words = [settings.python, *(word.format(**filled) for word in command.words)]
    try:
        ended = run_limited(
            words, limit, env=_environment(command, place.work), cwd=ROOT, logs=logs
        )
        reading = _read(command, place)
    finally:
        shutil.rmtree(place.work, ignore_errors=True)
    outcome, reason = judge(ended, reading, limit, last_words(logs.with_suffix(".err")))
    return Result(
        outcome=outcome,
        reason=reason,
        seconds=round(ended.seconds, 1),
        exit_code=ended.exit_code,
        command=words[1:],
        figures=dict(reading.figures),
        problems=list(reading.problems),
        details={**reading.details, "leftover_processes": ended.leftovers},
        logs=[f"logs/{logs.name}{suffix}" for suffix in (".out", ".err")],
        **about,
    )


def _environment(command: Command, work: Path) -> dict[str, str]:
    own = [ROOT, ROOT / "tools", ROOT / "tests/support"]
    paths = [*map(str, own), os.environ.get("PYTHONPATH", "")]
    return {
        **_ENVIRONMENT,
        **os.environ,
        **_FIXED,
        **command.env,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TMPDIR": str(work),
    }


def _read(command: Command, place: Place) -> Reading:
    """What a killed stage left may be cut off anywhere: that is a problem of the stage, too."""
    try:
        return strict(command.read(place))
    except Exception as error:
        return Reading(problems=[f"its figures cannot be read: {type(error).__name__}: {error}"])


def judge(ended: Ended, reading: Reading, limit: float, said: str) -> tuple[str, str]:
    """(outcome, reason). said: the `last_words` of its standard error."""
    if ended.exit_code is None:
        return TIMED_OUT, f"killed after {limit:.0f} s, with all it had started"
    first = reading.problems[0] if reading.problems else ""
    if reading.nothing_ran and ended.exit_code in (0, 5):  # 5: pytest found no test
        return LEFT_OUT, reading.nothing_ran
    if ended.exit_code:
        return FAILED, f"exit code {ended.exit_code}: {first if reading.figures else said}"
    if reading.problems:
        return FAILED, first
    return PASSED, ""


def last_words(path: Path) -> str:
    """The last error that a log names, or its last line; at most 300 characters."""
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [line for line in lines if _NAMES_AN_ERROR.match(line)]
    (*_, last) = errors or lines or ["it said nothing"]
    return last.strip()[:300]


def run_stages(
    numbered: Iterable[tuple[int, Stage]],
    settings: Settings,
    tell: Callable[[Result], None],
    machine_of: Callable[[Result], Machine],
) -> None:
    """All of them in turn. tell: called with each result; machine_of: what `environment` found."""
    machine = Machine()
    for number, stage in numbered:
        result = run_stage(number, stage, machine, settings)
        if stage.name == "environment":
            machine = machine_of(result)
        tell(result)


def results_on_disk(out: Path, stages: Sequence[Stage]) -> list[Result]:
    """Of this call and of earlier ones, in the order of the stages."""
    found = (
        read_result(result_file(out, number, stage.name)) for number, stage in enumerate(stages, 1)
    )
    return [result for result in found if result is not None]
