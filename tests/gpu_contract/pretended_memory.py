"""Memory of a training step on a pretended GPU, beside what a plan says of it.

Prints JSON: for each case the bytes at the peak of a step and those of the plan. Usage:
pretended_memory.py NUM_RANKS; started by `python -m pretend_gpu`, for two ranks by torchrun.
"""

import gc
import json
import sys
from dataclasses import replace
from unittest.mock import PropertyMock, patch

import torch
from jobs import Case, build
from megatron.core import parallel_state
from plan_jobs import full_microbatch, planned_run

from megatron_opsft.commands.plan.activations import activation_bytes
from megatron_opsft.commands.plan.assumptions import load_hardware
from megatron_opsft.commands.plan.job import PlannedRun
from megatron_opsft.runtime.distributed import gather_from_all

TOKENS = 512
CASES = [
    Case(),
    Case(dtype="bfloat16", recompute="full"),
    Case(model="qwen3_moe", dtype="bfloat16", recompute="selective"),
    Case(tp=2, sequence_parallel=True, dtype="bfloat16"),
    Case(pp=2, dtype="bfloat16"),
    Case(model="qwen3_moe", dp=2, ep=2, dtype="bfloat16"),
]


def measured(case: Case, num_microbatches: int) -> tuple[int, int]:
    """The pipeline stage, and bytes at the peak of the second step: moments are there then."""
    gc.collect()  # the model before is in cycles
    before = torch.cuda.memory_allocated()
    built = build(case)
    batch = full_microbatch(built, case, TOKENS)
    for step in range(2):
        built.trainer.step([batch] * num_microbatches, 1.0, lr=1e-3)
        if step == 0:
            torch.cuda.reset_peak_memory_stats()
    return built.layout.pp_rank, torch.cuda.max_memory_allocated() - before


def planned(case: Case, stage_index: int, num_microbatches: int) -> float:
    """Without TransformerEngine, whose layers a pretended GPU has not."""
    with patch.object(PlannedRun, "with_te", PropertyMock(return_value=False)):
        run = replace(planned_run(case, TOKENS), hardware=load_hardware("h100"))
        stage = run.stages[stage_index]
        kept, moment, loss = activation_bytes(run, stage, num_microbatches)
    held = stage.weight_bytes + stage.gradient_bytes + stage.optimizer_bytes
    return held + kept + max(moment, loss)


def main() -> None:
    """Measure, plan, print."""
    told = {}
    for case in CASES:
        if case.world_size != int(sys.argv[1]):
            continue
        case = replace(case, device_name="cuda")
        count = 4 if case.pp > 1 else 2
        stages = gather_from_all([measured(case, count)])
        parallel_state.destroy_model_parallel()
        for stage, found in stages:
            told[f"{case}-{case.dtype}-{case.recompute}-{stage}"] = (
                found,
                planned(case, stage, count),
            )
    if torch.distributed.get_rank() == 0:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
