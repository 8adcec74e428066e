"""What the commands that plan and simulate have in common: options, and what these name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megatron_opsft.architectures.shape import ModelShape
    from megatron_opsft.plan.hardware import Hardware
    from megatron_opsft.plan.job import TrainingJob
    from megatron_opsft.plan.lengths import Workload
    from megatron_opsft.plan.traces import Group

Gpu = Annotated[
    str, typer.Option(help="Device: h100, h200, a100, b200, cpu, or one of --hardware.")
]
GpusPerNode = Annotated[int, typer.Option(min=1, help="Devices, and ranks, of a node.")]
HardwareFile = Annotated[
    Path | None, typer.Option(help="Figures of devices, such as `plan calibrate` writes.")
]
NodeCores = Annotated[
    float | None,
    typer.Option(help="CPU cores that all ranks of a node share; by default cpu_cores of each."),
]
MeanTokens = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Mean response before the limit cuts it; by default the paper's end, 2186, or 62 % of "
        "a limit below the paper's.",
    ),
]
Sigma = Annotated[float, typer.Option(min=0, help="Spread of log lengths.")]
Acceptance = Annotated[
    float,
    typer.Option(min=0, max=1, help="Share of correct, finished responses."),
]
PromptTokens = Annotated[
    int, typer.Option(min=1, help="Mean tokens of a prompt, where nothing else says.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """The responses that the options describe: a log-normal's, or a trace's where there is one.

    mean_tokens: None: the usual one for the run's limit.
    """

    mean_tokens: float | None
    sigma: float
    acceptance: float
    prompt_tokens: int
    trace: "Sequence[Group] | None" = None

    def workload(self, job: "TrainingJob", seed: int | None = None) -> "Workload":
        """One step of a job. seed: of the draws; None: quantiles of the log-normal, no chance."""
        from megatron_opsft.plan.learning import learned_by
        from megatron_opsft.plan.lengths import make_workload, usual_mean_tokens
        from megatron_opsft.plan.traces import draw_from_trace

        limit = job.config.rollout.max_response_tokens
        prompt_tokens = min(self.prompt_tokens, job.config.data.max_prompt_tokens)
        if self.trace is not None:
            workload = draw_from_trace(
                self.trace,
                num_prompts=job.config.data.prompts_per_step,
                group_size=job.config.rollout.group_size,
                limit=limit,
                prompt_tokens=prompt_tokens,
                seed=seed or 0,
            )
        else:
            workload = make_workload(
                job.num_responses,
                mean_tokens=self.mean_tokens or usual_mean_tokens(limit),
                sigma=self.sigma,
                limit=limit,
                acceptance=self.acceptance,
                prompt_tokens=prompt_tokens,
                seed=seed,
            )
        return learned_by(job.config, workload)


def load_device(
    name: str, path: Path | None, gpus_per_node: int, node_cores: float | None
) -> "Hardware":
    """The device that the options name. Errors: `UserError`."""
    from megatron_opsft.plan.hardware import load_hardware

    return load_hardware(name, path, gpus_per_node=gpus_per_node, node_cores=node_cores)


def load_shape(model_path: str) -> "ModelShape":
    """As in config.json: a directory's, the shipped one, or the hub's. Errors: `UserError`."""
    from megatron_opsft.architectures.config_from_hf import read_model_shape
    from megatron_opsft.storage.model_paths import resolve_config

    return read_model_shape(resolve_config(model_path))
