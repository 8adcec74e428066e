"""`megatron-opsft plan`: the commands, as users call them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from megatron_opsft.command_line import Command, RunCommand, group
from megatron_opsft.errors import ANSWER_IS_NO, UserError
from megatron_opsft.plan.hardware import load_hardware
from megatron_opsft.plan.workload import (
    DEFAULT_PROMPT_TOKENS,
    DEFAULT_SIGMA,
    PAPER_ACCEPTANCE,
    make_workload,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megatron_opsft.plan.job import TrainingJob
    from megatron_opsft.plan.workload import Workload


class _OnDevices(Command):
    """What both commands are told of devices and of responses."""

    gpu: str = Field(
        "h100", description="Device: h100, h200, a100, b200, cpu, or one of --hardware."
    )
    gpus_per_node: int = Field(8, ge=1, description="Devices, and ranks, of a node.")
    hardware: Path | None = Field(
        None, description="Figures of devices, such as `plan calibrate` writes."
    )
    sigma: float = Field(DEFAULT_SIGMA, ge=0, description="Spread of log lengths.")
    prompt_tokens: int = Field(DEFAULT_PROMPT_TOKENS, ge=1, description="Mean tokens of a prompt.")
    as_json: bool = Field(False, alias="json", description="Print one JSON object.")


class Plan(_OnDevices, RunCommand):
    """Check a run end to end without a device, and say whether it fits and what it costs.

    Needs nothing of the model but config.json. Exit code 0: it fits; 4: it does not; 2: bad input.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "plan examples/configs/r1_distill_7b_paper.yaml --nodes 2",
        "plan CONFIG --nodes 1,8,64",
        "plan CONFIG rollout.engine=vllm --gpu a100 --search",
    )
    nodes: str = Field("1", description="Nodes; several, such as 1,8,64, give a row each.")
    steps: int | None = Field(None, ge=1, description="Steps to cost; by default run.steps.")
    mean_tokens: float | None = Field(
        None,
        ge=1,
        description="Mean response before the limit cuts it; by default the paper's end, 2186, or "
        "62 % of a limit below the paper's.",
    )
    acceptance: float = Field(
        PAPER_ACCEPTANCE, ge=0, le=1, description="Share of correct, finished responses."
    )
    search: bool = Field(False, description="Look for the fastest layout that fits.")
    top: int = Field(5, ge=1, description="Layouts that --search shows.")

    def run(self) -> int:
        """Print what the run takes; whether it fits as exit code."""
        counts = _parse_nodes(self.nodes, self.search)
        loaded = self.load()
        num_steps = self.steps or loaded.run.steps
        if num_steps < 1:
            raise UserError("run.steps=0 costs nothing; give --steps")
        from megatron_opsft.storage.model_paths import resolve_config

        device = load_hardware(self.gpu, self.hardware, gpus_per_node=self.gpus_per_node)
        resolve_config(loaded.model.path)  # a mistake is said before PyTorch is loaded
        from megatron_opsft.plan.job import make_job

        jobs = [make_job(loaded, device, count * self.gpus_per_node) for count in counts]
        workload = make_workload(
            jobs[0].config,
            mean_tokens=self.mean_tokens,
            sigma=self.sigma,
            acceptance=self.acceptance,
            prompt_tokens=self.prompt_tokens,
        )
        if self.search:
            return _search(jobs[0], workload, num_steps, self.top, self.as_json)
        return _plan(jobs, workload, num_steps, self.as_json)


def _parse_nodes(text: str, search: bool) -> list[int]:
    """ "1,8" as numbers. Errors: `UserError`, also for several where a search takes one."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UserError(f"--nodes={text} must be a number of nodes, or several such as 1,8,64")
    if search and len(counts) > 1:
        raise UserError(f"--nodes={text} and --search exclude each other; give one number")
    return counts


def _plan(jobs: "list[TrainingJob]", workload: "Workload", num_steps: int, as_json: bool) -> int:
    """Prints what the run takes on each number of devices; the exit code."""
    from megatron_opsft.plan.checks import check_job, notes_of
    from megatron_opsft.plan.estimate import estimate_run, run_as_json
    from megatron_opsft.plan.tables import show_nodes, show_run

    for job in jobs:
        check_job(job)
    runs = [estimate_run(job, workload, num_steps) for job in jobs]
    found = [run_as_json(one) | {"notes": notes_of(one)} for one in runs]
    if as_json:
        print(json.dumps(found[0] if len(found) == 1 else {"runs": found}))
    elif len(runs) == 1:
        _print(show_run(runs[0], notes_of(runs[0])))
    else:
        _print(show_nodes(runs))
    return 0 if all(one.fits for one in runs) else ANSWER_IS_NO


def _search(
    job: "TrainingJob", workload: "Workload", num_steps: int, top: int, as_json: bool
) -> int:
    """Prints the layouts; the exit code."""
    from megatron_opsft.plan.search import found_as_json, search_layouts
    from megatron_opsft.plan.tables import show_found

    found = search_layouts(job, workload, num_steps)
    if as_json:
        print(json.dumps(found_as_json(found[:top])))
    else:
        _print(show_found(found[:top], len(found)))
    return 0 if found[0].estimate.is_safe else ANSWER_IS_NO


def _print(what: "RenderableType") -> None:
    from rich.console import Console

    console = Console()
    # A file or pipe has no width of its own: no line is to be cut there.
    Console(width=None if console.is_terminal else 160).print(what, soft_wrap=False)


class Calibrate(_OnDevices):
    """Set the factor of each phase to what runs measured (metrics.jsonl).

    Peaks, sizes and prices stay as they are for --gpu. Exit code 2: bad input.
    """

    words: ClassVar[tuple[str, ...]] = ("run_dirs",)
    examples: ClassVar[tuple[str, ...]] = (
        "plan calibrate runs/a runs/b --out figures.yaml",
        "plan CONFIG --hardware figures.yaml --gpu h100",
    )
    run_dirs: tuple[Path, ...] = Field(description="Directories of runs on one kind of device.")
    out: Path = Field(description="File of figures to write, for --hardware.")
    overwrite: bool = Field(False, description="Replace what is at --out.")

    def run(self) -> None:
        """Write the figures, and print what they were and are."""
        from megatron_opsft.plan.calibrate import calibrate, read_steps, write_hardware

        if self.out.exists() and not self.overwrite:
            raise UserError(f"--out={self.out} exists; name another file or give --overwrite")
        base = load_hardware(self.gpu, self.hardware, gpus_per_node=self.gpus_per_node)
        steps = [
            step
            for path in self.run_dirs
            for step in read_steps(path, base, prompt_tokens=self.prompt_tokens, sigma=self.sigma)
        ]
        fitted = calibrate(steps, base)
        write_hardware(self.out, base, fitted, self.run_dirs)
        if self.as_json:
            phases = {phase: asdict(one) for phase, one in fitted.items()}
            print(json.dumps({"device": self.gpu, "phases": phases}))
            return
        for phase, one in fitted.items():
            print(
                f"{phase}: measured {one.measured:.3f} s, planned {one.planned:.3f} s; "
                f"{phase}_factor {getattr(base, f'{phase}_factor'):.4g} -> {one.factor:.4g}"
            )
        print(f"wrote {self.out}; use it with --hardware {self.out} --gpu {self.gpu}")


PROGRAM = group(
    "plan",
    "What a run needs and costs, before it is paid for. `plan CONFIG` is `plan run CONFIG`.",
    {"run": Plan, "calibrate": Calibrate},
    (
        "plan examples/configs/r1_distill_7b_paper.yaml --nodes 2",
        "plan calibrate runs/a runs/b --out figures.yaml",
    ),
)
