"""Warns before a run starts if its plan does not fit the GPUs; needs neither torch nor a GPU."""

import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from megatron_opsft.commands.plan.assumptions import (
    Hardware,
    hardware_here,
    load_hardware,
    named_device,
)
from megatron_opsft.config import Config
from megatron_opsft.errors import UserError, log
from megatron_opsft.models.storage.model_paths import has_config_here

_PATIENCE_SECONDS = 10
# Other sizes of a GPU than the one of the plan's figures differ by more than this.
_SAME_MEMORY = 0.05


def warn_of_fit(config: Config, world_size: int, hardware: Hardware | None) -> None:
    """Log a warning of one line if the plan of a run does not fit, fits tightly, or refuses it.

    hardware: None if the devices are not known; nothing is said then, and of a model whose
    config.json is not on this machine.
    """
    if hardware is None or not has_config_here(config.model.path):
        return
    # Here, not at the top: other commands need no plan.
    from megatron_opsft.commands.plan.job import check_planned_run, make_planned_run
    from megatron_opsft.commands.plan.least_offload import make_plan
    from megatron_opsft.commands.plan.show import SEARCH_HINT, describe_fit

    devices = f"{world_size} x {hardware.name}"
    try:
        run = make_planned_run(config, hardware, world_size)
        check_planned_run(run)
    except UserError as error:
        log.warning("the plan for %s refuses this run: %s", devices, error)
        return
    plan = make_plan(run, max(config.run.steps, 1))
    if not plan.is_safe:
        log.warning(
            "the plan for %s: %s %s",
            devices,
            describe_fit(plan),
            SEARCH_HINT,
        )


def hardware_of_machine(config: Config, num_ranks: int) -> Hardware | None:
    """Return the figures of the devices that `num_ranks` ranks use on this machine; None for a GPU
    that plans do not know.
    """
    gpus = ""
    if config.run.device != "cpu":
        query = "--query-gpu=name,memory.total"
        gpus = _output_of("nvidia-smi", query, "--format=csv,noheader,nounits")
    if not gpus and config.run.device != "cuda":
        here = hardware_here("cpu", 1, num_ranks)
        return here.model_copy(update={"memory_bytes": here.host_memory_bytes})
    name, _, mebibytes = gpus.partition("\n")[0].rpartition(",")
    device = named_device(name)
    if device is None or not mebibytes.strip().isdecimal():
        return None
    memory_bytes: float = int(mebibytes) * 2**20
    usual = load_hardware(device).memory_bytes
    if abs(memory_bytes - usual) < _SAME_MEMORY * usual:
        memory_bytes = usual
    return hardware_here(device, memory_bytes, num_ranks)


def hardware_of_slurm(
    options: Sequence[str], partition: str | None, ranks_per_node: int
) -> Hardware | None:
    """Return the figures of the GPUs that a SLURM job gets, by sbatch's own options, else by what
    sinfo says of the partition; None if neither names one kind that plans know.
    """
    device = named_device(" ".join(options))
    if device is None:
        words = ["--noheader", "--format=%G"]
        if partition is not None:
            words.append(f"--partition={partition}")
        kinds = re.findall(r"\bgpu:([^:(,\s]+)", _output_of("sinfo", *words))
        devices = {named_device(kind) for kind in kinds}
        device = devices.pop() if len(devices) == 1 else None
    return (
        None if device is None else load_hardware(device, gpus_per_node=ranks_per_node)
    )


def _output_of(*command: str) -> str:
    """Return what a command prints; "" if there is none, or it fails or takes long."""
    with suppress(OSError, subprocess.SubprocessError):
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=True,
        )
        return ended.stdout.strip()
    return ""
