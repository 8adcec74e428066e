"""What `plan` says of a shipped configuration, as comments at its head, and of all methods', as a
table; pure but for reading files.

A block of comments names the commands, `megatron-opsft plan FILE --nodes N --gpu DEVICE`; what
follows each is written here, from the plan that the command makes.
"""

import re
import textwrap
from pathlib import Path

from megatron_opsft.config import Config
from megatron_opsft.config_file import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.plan.checks import check_job
from megatron_opsft.plan.estimate import RunEstimate, estimate_run
from megatron_opsft.plan.hardware import load_hardware
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.lengths import (
    DEFAULT_PROMPT_TOKENS,
    DEFAULT_SIGMA,
    PAPER_ACCEPTANCE,
    PAPER_MEAN_TOKENS,
)
from megatron_opsft.plan.options import ResponseOptions, load_shape
from megatron_opsft.plan.stages import count_stages

# What training starts at, most responses cut off by the limit.
START_MEAN_TOKENS = 10000.0
START_ACCEPTANCE = 0.3

FIRST_LINE = (
    "# What these commands predict (tools/update_presets.py writes it; nothing is measured yet):"
)
LAST_LINE = "# End of the prediction."
TABLE_BEGINS = "<!-- tools/update_presets.py writes this -->\n"
TABLE_ENDS = "<!-- end -->\n"
_COMMAND = re.compile(r"^#   megatron-opsft plan (\S+) --nodes (\d+) --gpu (\w+)$", re.MULTILINE)
_WIDTH = 100


def has_block(text: str) -> bool:
    """Whether a configuration file states figures of its plan."""
    return FIRST_LINE in text


def with_figures(path: Path) -> str:
    """The text of a configuration file with the figures of its commands as they are now.

    Errors: `UserError` for a block without an end or without a command.
    """
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(FIRST_LINE + "\n")
    block, end, after = rest.partition(LAST_LINE + "\n")
    commands = list(_COMMAND.finditer(block))
    if not end or not commands:
        raise UserError(
            f"{path}: between {FIRST_LINE!r} and {LAST_LINE!r} there must be lines such as "
            "'#   megatron-opsft plan FILE --nodes 1 --gpu h100'"
        )
    config = load_config(path)
    written = []
    for command in commands:
        num_nodes, device = int(command[2]), command[3]
        now, start = (
            estimate_preset(config, num_nodes, device, at_start=at_start)
            for at_start in (False, True)
        )
        written += [command[0], *_comment(_sentences(now, start))]
    return before + "\n".join([FIRST_LINE, *written, LAST_LINE, ""]) + after


def methods_table(folder: Path) -> str:
    """Markdown of what a plan says of every method's preset with the paper's settings, on a node of
    8 H100.
    """
    names = ("rollout", "old log-probs", "reference", "train", "push", "step")
    columns = ("method", "trained responses", *(f"{name} s" for name in names), "GB free")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for path in sorted(folder.glob("*_paper.yaml")):
        config = load_config(path)
        plan = estimate_preset(config, 1, "h100", at_start=False)
        step = plan.step
        seconds = (step.rollout, step.old_logprob, step.reference, step.train, step.push)
        cells = [f"`{config.method.name}`", str(len(plan.workload.accepted))]
        cells += [f"{each:.1f}" if each else "-" for each in (*seconds, step.total)]
        lines.append("| " + " | ".join([*cells, _gb(plan.worst.margin)]) + " |")
    return "\n".join(lines) + "\n"


def with_methods_table(page: str, folder: Path) -> str:
    """The page with the table as it is now, between its marks."""
    before, _, rest = page.partition(TABLE_BEGINS)
    _, end, after = rest.partition(TABLE_ENDS)
    assert end, "the page has no marks for the table"
    return before + TABLE_BEGINS + methods_table(folder) + TABLE_ENDS + after


def estimate_preset(config: Config, num_nodes: int, device: str, *, at_start: bool) -> RunEstimate:
    """The plan of a configuration on nodes of 8 devices; at_start: with the long responses that
    training begins with, instead of those that it ends at. Parameters are counted, not built.
    """
    hardware = load_hardware(device)
    shape, world_size = load_shape(config.model.path), num_nodes * hardware.gpus_per_node
    job = TrainingJob(config=config, shape=shape, hardware=hardware, world_size=world_size)
    check_job(job)
    responses = ResponseOptions(
        mean_tokens=START_MEAN_TOKENS if at_start else PAPER_MEAN_TOKENS,
        sigma=DEFAULT_SIGMA,
        acceptance=START_ACCEPTANCE if at_start else PAPER_ACCEPTANCE,
        prompt_tokens=DEFAULT_PROMPT_TOKENS,
    )
    return estimate_run(job, count_stages(job), responses.workload(job), config.run.steps)


def _sentences(now: RunEstimate, start: RunEstimate) -> str:
    rank, job, step = now.worst, now.job, now.step
    stage = rank.stage
    engine = rank.rollout - rank.reserved - stage.resident_bytes
    hours = step.total * now.num_steps / 3600
    fullest = {"rollout": "rollouts", "train": "training", "push": "pushes"}[rank.fullest_phase]
    return (
        f"GB on each of {job.world_size} GPUs of {_gb(rank.limit)}: weights "
        f"{_gb(stage.weight_bytes)}, gradients {_gb(stage.gradient_bytes)}, optimizer "
        f"{_gb(stage.optimizer_bytes)}, reserved {_gb(rank.reserved)}. Rollouts add the engine's "
        f"{_gb(engine)} (its weights {_gb(rank.engine_weights)}, keys and values "
        f"{_gb(rank.kv_cache)}); training adds activations of {job.microbatch_tokens:,} tokens, "
        f"{_gb(rank.activations)}, and the loss, {_gb(rank.loss)}. Most is used in {fullest}, "
        f"{_gb(rank.peak)}: {_gb(rank.margin)} are free. A checkpoint needs "
        f"{now.checkpoint.saved_bytes / 1e9:.0f} GB of a node's host memory. "
        f"Seconds a step: {step.total:.1f} (rollout {step.rollout:.1f}, training {step.train:.1f}, "
        f"push {step.push:.1f}), {hours:.1f} hours for {now.num_steps:,} steps; at the start, with "
        f"--mean-tokens {START_MEAN_TOKENS:.0f} --acceptance {START_ACCEPTANCE}, "
        f"{start.step.total:.1f}."
    )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
