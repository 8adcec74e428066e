"""What a stage is, and how its commands are written down: tests, reports of our own, benchmarks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from proof.readings import Figure, Reading, read_lines, read_report, read_tests


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a stage writes. logs: its log's path without suffix; work: a folder that is removed."""

    logs: Path
    work: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What one stage runs on one kind of device.

    words: what follows the interpreter; `{work}` is `Place.work`, `{device}` cuda or cpu. modules:
    top-level packages that must be there. gpus, gpu_gb: how many GPUs with how much memory each.
    expected_seconds: what it probably takes; it is not begun with less left. limit_seconds: where
    it is killed.
    """

    words: tuple[str, ...]
    modules: tuple[str, ...]
    expected_seconds: float
    limit_seconds: float
    read: Callable[[Place], Reading]
    gpus: int = 0
    gpu_gb: float = 0.0
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """proves: one line for the results. on_cpu: None for what only a GPU can show."""

    name: str
    proves: str
    on_gpu: Command
    on_cpu: Command | None = None


# What megatron_opsft.model and .loss import; comparing with Hugging Face needs more, and whole
# steps with rollouts more again.
CORE = ("torch", "megatron", "numpy", "packaging", "pydantic", "psutil")
REFERENCE = (*CORE, "ruamel.yaml", "transformers", "safetensors")
VERIFIER = ("math_verify", "latex2sympy2_extended", "antlr4")
SESSION = (*REFERENCE, *VERIFIER, "rich")


def tests(
    *words: str, modules: tuple[str, ...], seconds: float, limit: float, gpus: int = 0
) -> Command:
    """Of pytest. limit: seconds."""
    return Command(
        words=("-m", "pytest", *words, "-p", "no:cacheprovider", "--junitxml={work}/junit.xml"),
        modules=("pytest", *modules),
        expected_seconds=seconds,
        limit_seconds=limit,
        read=lambda place: read_tests(place.work / "junit.xml"),
        gpus=gpus,
    )


def report(
    *words: str,
    ranks: int = 1,
    modules: tuple[str, ...],
    seconds: float,
    limit: float,
    gpus: int = 0,
    env: Mapping[str, str] | None = None,
) -> Command:
    """Of a module that prints one line with figures, problems and details. limit: seconds."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    torchrun += ["--nproc-per-node", str(ranks)]
    return Command(
        words=(*(torchrun if ranks > 1 else ()), "-m", *words),
        modules=modules,
        expected_seconds=seconds,
        limit_seconds=limit,
        read=lambda place: read_report(place.logs.with_suffix(".out")),
        gpus=gpus,
        env=env or {},
    )


def benchmark(
    *words: str,
    figures: tuple[Figure, ...],
    seconds: float,
    limit: float = 180,
    modules: tuple[str, ...] = CORE,
    gpus: int = 0,
    gpu_gb: float = 0.0,
) -> Command:
    """Of `benchmarks/`, the first word its name. limit: seconds."""
    return Command(
        words=(f"benchmarks/{words[0]}.py", *words[1:]),
        modules=modules,
        expected_seconds=seconds,
        limit_seconds=limit,
        read=lambda place: read_lines(place.logs.with_suffix(".out"), figures),
        gpus=gpus,
        gpu_gb=gpu_gb,
    )
