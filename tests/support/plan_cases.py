"""Jobs of published models for plans, without Megatron."""

from megatron_opsft.architectures.shape import ModelShape
from megatron_opsft.config.load import load_config
from megatron_opsft.plan.hardware import load_hardware
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.workload import Workload, make_workload


def make_job(shape: ModelShape, world_size: int, *overrides: str, gpu: str = "h100") -> TrainingJob:
    """vLLM inside the training ranks, in bfloat16, unless the overrides say otherwise."""
    settings = ["model.path=m", "data.train=problems.jsonl", "rollout.engine=vllm", *overrides]
    config = load_config(None, settings)
    return TrainingJob(
        config=config, shape=shape, hardware=load_hardware(gpu), world_size=world_size
    )


def make_responses(
    job: TrainingJob, mean_tokens: float = 2000.0, acceptance: float = 0.5
) -> Workload:
    """Of one step."""
    return make_workload(
        job.config,
        mean_tokens=mean_tokens,
        sigma=0.6,
        acceptance=acceptance,
        prompt_tokens=100,
    )
