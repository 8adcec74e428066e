"""`megatron-opsft plan`: the commands, as users call them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from megatron_opsft.command_line import Command, RunCommand, group
from megatron_opsft.errors import ANSWER_IS_NO, UserError
from megatron_opsft.plan.hardware import load_hardware
from megatron_opsft.plan.workload import DEFAULT_PROMPT_TOKENS, DEFAULT_SIGMA, PAPER_ACCEPTANCE


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


class PlanRun(_OnDevices, RunCommand):
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
        counts = self._node_counts()
        config = self.load()
        num_steps = self.steps or config.run.steps
        if num_steps < 1:
            raise UserError("run.steps=0 costs nothing; give --steps")
        from megatron_opsft.storage.model_paths import resolve_config

        device = load_hardware(self.gpu, self.hardware, gpus_per_node=self.gpus_per_node)
        resolve_config(config.model.path)  # a mistake is said before PyTorch is loaded
        from megatron_opsft.plan import estimate, job, search, tables

        first = job.make_job(
            config,
            device,
            counts[0] * self.gpus_per_node,
            mean_tokens=self.mean_tokens,
            sigma=self.sigma,
            acceptance=self.acceptance,
            prompt_tokens=self.prompt_tokens,
        )
        if self.search:
            found = search.search_layouts(first, num_steps)
            shown, fits = found[: self.top], found[0].plan.is_safe
            layouts = [{"overrides": one.overrides, **one.plan.as_json()} for one in shown]
            text = tables.show_found(shown, len(found))
            return self._answer(text, {"fits": fits, "layouts": layouts}, fits)
        jobs = [replace(first, world_size=count * self.gpus_per_node) for count in counts]
        for one in jobs:
            job.check_job(one)
        plans = [estimate.Plan(job=one, num_steps=num_steps) for one in jobs]
        fits = not any(plan.problems for plan in plans)
        if len(plans) == 1:
            return self._answer(tables.show_plan(plans[0]), plans[0].as_json(), fits)
        rows = {"runs": [plan.as_json() for plan in plans]}
        return self._answer(tables.show_nodes(plans), rows, fits)

    def _answer(self, text: str, made: Mapping[str, object], fits: bool) -> int:
        print(json.dumps(made) if self.as_json else text)
        return 0 if fits else ANSWER_IS_NO

    def _node_counts(self) -> list[int]:
        """Errors: `UserError`, also for several where a search takes one."""
        try:
            counts = [int(part) for part in self.nodes.split(",")]
        except ValueError:
            counts = []
        if not counts or min(counts) < 1:
            raise UserError(
                f"--nodes={self.nodes} must be a number of nodes, or several such as 1,8,64"
            )
        if self.search and len(counts) > 1:
            raise UserError(
                f"--nodes={self.nodes} and --search exclude each other; give one number"
            )
        return counts


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
        from megatron_opsft.plan.measured import calibrate, write_hardware

        if self.out.exists() and not self.overwrite:
            raise UserError(f"--out={self.out} exists; name another file or give --overwrite")
        base = load_hardware(self.gpu, self.hardware, gpus_per_node=self.gpus_per_node)
        fitted = calibrate(self.run_dirs, base, prompt_tokens=self.prompt_tokens, sigma=self.sigma)
        write_hardware(self.out, base, fitted, self.run_dirs)
        if self.as_json:
            print(json.dumps({"device": self.gpu, "phases": fitted}))
            return
        for phase, one in fitted.items():
            print(
                f"{phase}: measured {one['measured']:.3f} s, planned {one['planned']:.3f} s; "
                f"{phase}_factor {getattr(base, f'{phase}_factor'):.4g} -> {one['factor']:.4g}"
            )
        print(f"wrote {self.out}; use it with --hardware {self.out} --gpu {self.gpu}")


PROGRAM = group(
    "plan",
    "What a run needs and costs, before it is paid for. `plan CONFIG` is `plan run CONFIG`.",
    {"run": PlanRun, "calibrate": Calibrate},
    (
        "plan examples/configs/r1_distill_7b_paper.yaml --nodes 2",
        "plan calibrate runs/a runs/b --out figures.yaml",
    ),
)
