"""Chooses `train.offload=auto`: what a plan for the GPU of this rank needs."""

from dataclasses import replace

from megatron_opsft.commands.plan.assumptions import Hardware, hardware_here
from megatron_opsft.commands.plan.estimate import Plan
from megatron_opsft.commands.plan.job import PlannedRun
from megatron_opsft.config.training import OffloadLevel
from megatron_opsft.errors import log
from megatron_opsft.run.start.checked_run import CheckedRun
from megatron_opsft.runtime.launched import launched_rank, ranks_on_this_machine


def with_least_offload(checked: CheckedRun) -> CheckedRun:
    """Return the run with a value in place of `train.offload=auto`; rank 0 logs which one.

    On a GPU it is the least with which a plan fits in the memory of this rank's GPU, the most if
    none does; on a CPU it is none, since host memory is all there is. Called by every rank.
    """
    config = checked.config
    if config.train.offload != "auto":
        return checked
    # Here, not at the top: a plan needs no torch.
    from megatron_opsft.runtime.device import gpu_memory_bytes

    level: OffloadLevel = "none"
    memory_bytes = gpu_memory_bytes(config.run.device)
    if memory_bytes is not None:
        # Only the memory matters here: all other figures may be an H100's.
        here = hardware_here("h100", memory_bytes, ranks_on_this_machine())
        level = _least_level(checked, here)
        if launched_rank() == 0:
            log.info(
                "train.offload=auto: %s, by a plan for %.1f GB of GPU memory",
                level,
                memory_bytes / 1e9,
            )
    train = config.train.model_copy(update={"offload": level})
    return replace(checked, config=config.model_copy(update={"train": train}))


def _least_level(checked: CheckedRun, hardware: Hardware) -> OffloadLevel:
    """Return the least level with which the run fits; the most that it can have if none does."""
    run = PlannedRun(
        config=checked.config,
        shape=checked.shape,
        hardware=hardware,
        world_size=checked.world_size,
    )
    return make_plan(run, num_steps=1).run.train.offload_level


def make_plan(run: PlannedRun, num_steps: int) -> Plan:
    """Plan a run that has passed `check_planned_run`; in place of `train.offload=auto` with the
    least value with which it fits, with the most if none does, and on a CPU with none.
    """
    if run.train.offload != "auto":
        return Plan(run=run, num_steps=num_steps)
    plan = Plan(run=run.with_offload("none"), num_steps=num_steps)
    if not plan.problems or not run.hardware.is_cuda:
        return plan
    level = plan.fitting_offload or plan.possible_offloads[-1]
    return Plan(run=run.with_offload(level), num_steps=num_steps)
