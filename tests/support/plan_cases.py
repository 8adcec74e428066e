"""Published models, and jobs of them for plans, without weights and without Megatron."""

from dataclasses import replace
from typing import Any

from megatron_opsft.commands.plan.assumptions import load_hardware, make_workload
from megatron_opsft.commands.plan.estimate import Plan
from megatron_opsft.commands.plan.job import PlannedRun
from megatron_opsft.config.load import load_config
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.model_paths import MODEL_CONFIGS

SMALL, LARGE, MIXTURE = "DeepSeek-R1-Distill-Qwen-1.5B", "Qwen2.5-72B", "Qwen3-30B-A3B"
REAL_SHAPES = {
    file.parent.name: read_model_shape(file.parent) for file in MODEL_CONFIGS.glob("*/*/*.json")
}
REAL_SHAPES["DeepSeek-R1-Distill-Qwen-32B"] = replace(
    REAL_SHAPES[LARGE], num_layers=64, hidden_size=5120, ffn_size=27648, num_heads=40
)


def make_run(
    name: str, world_size: int, *overrides: str, gpu: str = "h100", **responses: Any
) -> PlannedRun:
    """vLLM inside the training ranks, in bfloat16, unless the overrides say otherwise; half of the
    responses are accepted.
    """
    settings = ["model.path=m", "data.train=problems.jsonl", "rollout.engine=vllm", *overrides]
    config = load_config(None, settings)
    usual = {"mean_tokens": 2000.0, "acceptance": 0.5}
    return PlannedRun(
        config=config,
        shape=REAL_SHAPES[name],
        hardware=load_hardware(gpu),
        world_size=world_size,
        workload=make_workload(config, **(usual | responses)),
    )


def planned(run: PlannedRun) -> Plan:
    """A run of 100 steps."""
    return Plan(run=run, num_steps=100)
