"""The rollout engine of an evaluation, built from a model directory; it holds no weights yet."""

import torch

from megatron_opsft.evaluate.inputs import Inputs, Subject
from megatron_opsft.rollout.engine import Replica
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.rollout.vllm.core import VllmSettings
from megatron_opsft.rollout.vllm.engine import VllmEngine
from megatron_opsft.runtime.job import Job

COLLECTIVE_HOURS = 24  # a rank that waits for the last long responses of another one
EvalEngine = HfEngine | VllmEngine


def open_engine(inputs: Inputs, subject: Subject, job: Job) -> EvalEngine:
    """Called by every rank after it joined the job. Errors: `UserError` for what vLLM refuses."""
    settings, model = inputs.settings, subject.model
    if settings.engine == "hf":
        return HfEngine.from_config(
            model.directory,
            model.tokenizer,
            dtype=getattr(torch, inputs.dtype),
            device=inputs.device.torch_device,
            batch_size=inputs.batch_size,
            replica=Replica(index=job.rank, count=job.world_size),
            exact=inputs.dtype == "float32",
        )
    longest = max(len(p.prompt_ids) for s in inputs.subjects for p in s.prompts.values())
    return VllmEngine(
        VllmSettings(
            model_dir=model.directory,
            dtype=inputs.dtype,
            is_cuda=inputs.device.is_cuda,
            tp=settings.tp,
            max_tokens=min(longest + inputs.max_tokens, model.max_positions),
            batch_size=inputs.batch_size,
            gpu_memory_fraction=settings.gpu_memory_fraction,
            kv_cache_bytes=None,
            seed=settings.seed,
            under_launcher=True,
            collective_minutes=COLLECTIVE_HOURS * 60,
            job_id=job.id,
        ),
        model.table,
        model.tokenizer,
        rank=job.rank,
        world_size=job.world_size,
    )
