"""The rollout engine of an evaluation, built from a model directory; it holds no weights yet."""

from megatron_opsft.evaluate.inputs import Inputs, Subject
from megatron_opsft.rollout.engine import EngineSettings, RolloutEngine
from megatron_opsft.rollout.open_engine import build_engine
from megatron_opsft.runtime.job import Job

COLLECTIVE_HOURS = 24  # a rank that waits for the last long responses of another one
START_HOURS = 1  # a rank that has not come to the start after so long does not come


def open_engine(inputs: Inputs, subject: Subject, job: Job) -> RolloutEngine:
    """Called by every rank after it joined the job. Errors: `UserError` for what the engine
    refuses.
    """
    settings, model = inputs.settings, subject.model
    longest = max(len(ids) for subject in inputs.subjects for ids in subject.prompts.values())
    return build_engine(
        settings.engine,
        EngineSettings(
            model_dir=model.directory,
            dtype=inputs.dtype,
            is_cuda=inputs.device.is_cuda,
            tp=settings.tp,
            max_tokens=min(longest + inputs.max_tokens, model.max_positions),
            batch_size=inputs.batch_size,
            gpu_memory_fraction=settings.gpu_memory_fraction,
            kv_cache_bytes=None,
            seed=settings.seed,
            collective_minutes=COLLECTIVE_HOURS * 60,
            rank=job.rank,
            world_size=job.world_size,
            job_id=job.id,
        ),
        model.table,
        model.tokenizer,
        inputs.device,
    )
