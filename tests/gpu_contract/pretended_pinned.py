"""Host memory that a reference model and checkpoints pin on pretended GPUs, beside a plan's.

Prints JSON, for each case: the bytes that all ranks pin and those of the plan, after the reference
model is made, and after the first checkpoint and the second; how many bytes more alignment may
take; and how many blocks a rank has pinned. A checkpoint is written while the weights change, and
loaded. Usage: pretended_pinned.py NUM_RANKS DIRECTORY; started by `python -m pretend_gpu`, for two
ranks by torchrun.
"""

import gc
import json
import mmap
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from jobs import Built, Case, as_arrays, build, exported
from megatron.core import parallel_state
from plan_jobs import planned_run
from pretend_gpu import active

from megatron_opsft.commands.plan.assumptions import load_hardware
from megatron_opsft.commands.plan.estimate import Plan
from megatron_opsft.methods.catalog.grpo import Grpo
from megatron_opsft.runtime.distributed import gather_from_all
from megatron_opsft.runtime.pinned import ALIGNMENT
from megatron_opsft.trainer.model.checkpoint import Checkpointer
from megatron_opsft.trainer.model.checkpoint_share import describe_models, own_share
from megatron_opsft.trainer.model.reference import ReferenceModel

CASES = [
    Case(),
    Case(dtype="bfloat16"),
    Case(model="qwen3_moe", dtype="bfloat16"),
    Case(dp=2, dtype="bfloat16"),
]


def planned(case: Case) -> Plan:
    """A run with a reference model, on GPUs that have no room for it."""
    run = planned_run(case, tokens=512)
    config = run.config.model_copy(update={"method": Grpo(beta=0.04)})
    hardware = load_hardware("h100").model_copy(update={"memory_bytes": 1.0})
    return Plan(run=replace(run, config=config, hardware=hardware), num_steps=1)


def save_while_it_changes(built: Built, saver: Checkpointer, step: int) -> None:
    """Errors: `AssertionError` where what is loaded is not what was there when the save began."""
    then = as_arrays(exported(built))
    saver.start(step, {})
    for own in share_of(built):
        own.data.fill_(step)
    assert saver.finish() is None
    assert saver.load_newest()["step"] == step  # type: ignore[index]
    loaded = as_arrays(exported(built))
    assert all((loaded[name] == then[name]).all() for name in then)


def share_of(built: Built) -> list[Any]:
    """What a rank writes, views of what it trains."""
    models = describe_models(built.trainer.models)
    return own_share(models, built.trainer.optimizer, is_loading=False)


def measured(case: Case, directory: Path) -> dict[str, Any]:
    """Figures of this case, over all ranks."""
    (gpu,) = active
    gc.collect()  # the model before is in cycles
    assert gpu.registered == {}
    before = gpu.pinned_bytes
    built, plan = build(case), planned(case)
    pinned = []
    with patch("megatron_opsft.trainer.model.reference.has_room_for_good", lambda *about: False):
        reference = ReferenceModel(built.trainer, case.device)
    pinned.append(gpu.pinned_bytes - before)
    saver = Checkpointer(directory, built.trainer.models, built.trainer.optimizer, keep=1)
    for step in (1, 2):
        save_while_it_changes(built, saver, step)
        pinned.append(gpu.pinned_bytes - before)
    saver.wait_for_deletion()
    assert all(frozen.is_pinned() for frozen in reference._frozen_of.values())
    num_tensors = len(share_of(built)) + len(reference._frozen_of)
    padding = num_tensors * (ALIGNMENT - 1) + 2 * (mmap.PAGESIZE - 1)
    ranks = gather_from_all([(*pinned, padding)])
    *sums, bound = (sum(column) for column in zip(*ranks, strict=True))
    return {
        "pinned": sums,
        "planned": [plan.reference_host_bytes, plan.pinned_bytes, plan.pinned_bytes],
        "bound": bound,
        "blocks": len(gpu.registered),
    }


def main() -> None:
    """Measure, plan, print."""
    num_ranks, directory = sys.argv[1:]
    told = {}
    for number, case in enumerate(CASES):
        if case.world_size == int(num_ranks):
            case = replace(case, device_name="cuda")
            told[f"{case} {case.dtype}"] = measured(case, Path(directory) / str(number))
            parallel_state.destroy_model_parallel()
    if torch.distributed.get_rank() == 0:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
