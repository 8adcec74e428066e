"""`megatron-opsft plan`: its commands and their options."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from megatron_opsft.commands.command_line import Command, RunCommand, group
from megatron_opsft.commands.plan.assumptions import PAPER_ACCEPTANCE, load_hardware
from megatron_opsft.commands.plan.show import (
    NUM_SHOWN,
    show_found,
    show_layouts,
    show_nodes,
    show_plan,
)
from megatron_opsft.errors import ANSWER_IS_NO, UserError
from megatron_opsft.records import JsonObject
from megatron_opsft.run.start.checked_run import fewest_ranks
from megatron_opsft.runtime.console import say
from megatron_opsft.runtime.libraries import sees_gpu

if TYPE_CHECKING:
    from megatron_opsft.commands.plan.estimate import Plan
    from megatron_opsft.commands.plan.job import PlannedRun


class _OnDevices(Command):
    """The options about devices that both commands share."""

    gpu: str = "h100"
    """Device: h100, h200, a100, b200, cpu, or one of --hardware."""
    gpus_per_node: int | None = Field(None, ge=1)
    """Devices, and ranks, of a node; by default 8, on CPUs as many ranks as the layout needs."""
    hardware: Path | None = None
    """Figures of devices, such as `plan calibrate` prints."""


class PlanRun(_OnDevices, RunCommand):
    """Check a run end to end without a device, and say whether it fits and what it costs.

    Needs nothing of the model but config.json. Exit code 0: it fits; 4: it does not; 2: bad input.
    """

    examples = (
        "plan examples/configs/r1_distill_7b_paper.yaml --nodes 2",
        "plan CONFIG --nodes 1,8,64",
        "plan CONFIG --nodes 1,2,8 --search",
        "plan CONFIG rollout.engine=vllm --gpu a100 --search",
    )
    nodes: str = "1"
    """Number of nodes; 1,8,64 gives a row for each."""
    mean_tokens: float | None = Field(None, ge=1)
    """Mean response length if none were cut off; by default 2186, the paper's at its last step
    under its limit of 3,500 tokens, and the same share (62 %) of a lower limit.
    """
    acceptance: float = Field(PAPER_ACCEPTANCE, ge=0, le=1)
    """Share of correct, finished responses."""
    search: bool = False
    """Look for the fastest layout that fits; of several numbers of nodes, for that of each."""
    as_json: bool = Field(False, alias="json")
    """Print one JSON object."""

    def run(self) -> int:
        """Print what the run takes. Returns the exit code, which says if it fits."""
        node_counts = self._node_counts()
        config = self.load()
        if config.run.steps < 1:
            raise UserError("run.steps=0 costs nothing; set run.steps above 0")
        ranks_per_node, note = self.gpus_per_node or 8, ""
        if not {"gpu", "hardware"} & self.model_fields_set and not sees_gpu():
            note = (
                f"assumed: {ranks_per_node} x {self.gpu} on a node, as no GPU is seen here; --gpu "
                "names another device (h200, a100, b200, cpu)\n\n"
            )
        if self.gpu == "cpu" and self.gpus_per_node is None:
            ranks_per_node = fewest_ranks(config)
            note = (
                f"ranks of a node: {ranks_per_node}, as the layout needs; "
                "others with --gpus-per-node\n\n"
            )
        device = load_hardware(self.gpu, self.hardware, gpus_per_node=ranks_per_node)
        # Imported here, because they are heavy.
        from megatron_opsft.commands.plan.job import make_planned_run

        first = make_planned_run(
            config,
            device,
            node_counts[0] * ranks_per_node,
            mean_tokens=self.mean_tokens,
            acceptance=self.acceptance,
        )
        runs = [
            replace(first, world_size=count * ranks_per_node) for count in node_counts
        ]
        answer = _search if self.search else _plan
        fits, text, as_json = answer(runs)
        say(json.dumps(as_json) if self.as_json else note + text)
        return 0 if fits else ANSWER_IS_NO

    def _node_counts(self) -> list[int]:
        """Read --nodes. Errors: `UserError`."""
        words = self.nodes.split(",")
        if not all(word.isdecimal() and int(word) for word in words):
            raise UserError(
                f"--nodes={self.nodes} must be a number of nodes, or several: 1,8,64"
            )
        return [int(word) for word in words]


_Answer = tuple[bool, str, JsonObject]
"""If the run fits, and what is printed: as text, and as JSON."""


def _plan(runs: Sequence["PlannedRun"]) -> _Answer:
    """Plan one run on each of several numbers of nodes, in its own layout."""
    from megatron_opsft.commands.plan.job import check_planned_run
    from megatron_opsft.commands.plan.least_offload import make_plan

    plans = []
    for run in runs:
        check_planned_run(run)
        plans.append(make_plan(run, run.config.run.steps))
    fits = not any(plan.problems for plan in plans)
    if len(plans) == 1:
        return fits, show_plan(plans[0]), plans[0].as_json()
    return fits, show_nodes(plans), {"runs": [plan.as_json() for plan in plans]}


def _search(runs: Sequence["PlannedRun"]) -> _Answer:
    """Look for the best layout of one run on each of several numbers of nodes; where none is safe,
    for changes that would help.
    """
    from megatron_opsft.commands.plan.search import search_layouts, what_would_fit

    found, would_fit = [], []
    for run in runs:
        plans = search_layouts(run, run.config.run.steps)
        is_safe = plans[0].is_safe
        found.append(plans)
        would_fit.append([] if is_safe else what_would_fit(run, run.config.run.steps))
    bests = [plans[0] for plans in found]
    fits = all(best.is_safe for best in bests)
    if len(runs) == 1:
        layouts = [_layout_as_json(plan) for plan in found[0][:NUM_SHOWN]]
        as_json = {"fits": fits, "would_fit": would_fit[0], "layouts": layouts}
        return fits, show_layouts(found[0], would_fit[0]), as_json
    rows = []
    for best, changes in zip(bests, would_fit, strict=True):
        rows.append({"would_fit": changes, **_layout_as_json(best)})
    return fits, show_found(bests, would_fit), {"fits": fits, "runs": rows}


def _layout_as_json(plan: "Plan") -> JsonObject:
    return {"overrides": plan.overrides, **plan.as_json()}


class Calibrate(_OnDevices):
    """Print the device's figures with the factor of each phase that runs measured (metrics.jsonl).

    Peaks, sizes and prices stay as they are for --gpu. Exit code 2: bad input.
    """

    words = ("run_dirs",)
    examples = (
        "plan calibrate runs/a runs/b > figures.yaml",
        "plan CONFIG --hardware figures.yaml --gpu h100",
    )
    run_dirs: tuple[Path, ...]
    """Directories of runs on one kind of device."""

    def run(self) -> None:
        """Print a file for --hardware."""
        from megatron_opsft.commands.plan.measured import calibrate

        base = load_hardware(
            self.gpu, self.hardware, gpus_per_node=self.gpus_per_node or 8
        )
        say(calibrate(self.run_dirs, base))


PROGRAM = group(
    "plan",
    "Predict memory, time and cost of a run, without a GPU. `plan CONFIG` is `plan run CONFIG`.",
    {"run": PlanRun, "calibrate": Calibrate},
    (PlanRun.examples[0], Calibrate.examples[0]),
)
