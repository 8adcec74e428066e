"""Jobs of published models for plans, without Megatron."""

from typing import Any

from real_shapes import REAL_SHAPES

from megatron_opsft.config.load import load_config
from megatron_opsft.plan.assumptions import load_hardware, make_workload
from megatron_opsft.plan.estimate import Plan
from megatron_opsft.plan.job import Job

SMALL, LARGE, MIXTURE = "DeepSeek-R1-Distill-Qwen-1.5B", "Qwen2.5-72B", "Qwen3-30B-A3B"


def make_job(
    name: str, world_size: int, *overrides: str, gpu: str = "h100", **responses: Any
) -> Job:
    """vLLM inside the training ranks, in bfloat16, unless the overrides say otherwise; half of the
    responses are accepted.
    """
    settings = ["model.path=m", "data.train=problems.jsonl", "rollout.engine=vllm", *overrides]
    config = load_config(None, settings)
    usual = {"mean_tokens": 2000.0, "acceptance": 0.5}
    return Job(
        config=config,
        shape=REAL_SHAPES[name],
        hardware=load_hardware(gpu),
        world_size=world_size,
        workload=make_workload(config, **(usual | responses)),
    )


def planned(job: Job) -> Plan:
    """A run of 100 steps."""
    return Plan(job=job, num_steps=100)
