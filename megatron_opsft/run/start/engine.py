"""Opens the rollout engine of a run, beside its trainer."""

from pathlib import Path
from uuid import uuid4

from megatron_opsft.config import Config
from megatron_opsft.rollout.engine import EngineSettings, RolloutEngine
from megatron_opsft.rollout.open_engine import build_engine
from megatron_opsft.run.start.checked_run import max_engine_tokens
from megatron_opsft.run.start.input import RunInput
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.distributed import Layout, broadcast_object
from megatron_opsft.runtime.phase import announce
from megatron_opsft.trainer.model.load import TrainerParts
from megatron_opsft.trainer.model.offload import Offload


def open_engine(
    config: Config,
    run_input: RunInput,
    parts: TrainerParts,
    offload: Offload,
    device: Device,
    layout: Layout,
) -> RolloutEngine:
    """Open the rollout engine beside the trainer `parts`. Called by every rank.

    vLLM takes its memory now, and measures what is free: the trainer sleeps, as it does later while
    the engine is awake. Then the engine sleeps until the first weight sync, as after every batch.
    """
    name = config.rollout.engine
    announce(f"opening the rollout engine ({name})")
    settings = engine_settings(config, run_input.model_dir, device, layout)
    offload.sleep()
    tokenizer = run_input.encoder.tokenizer
    engine = build_engine(name, settings, parts.shards.table, tokenizer, device)
    if offload.is_used:
        engine.sleep()
    offload.wake_state()
    return engine


def engine_settings(
    config: Config, model_dir: Path, device: Device, layout: Layout
) -> EngineSettings:
    """Return the settings of the run's engine on this rank. Collective over the world."""
    rollout = config.rollout
    return EngineSettings(
        model_dir=model_dir,
        dtype=config.model.dtype,
        is_cuda=device.is_cuda,
        tp=rollout.tp,
        max_tokens=max_engine_tokens(config),
        batch_size=rollout.batch_size,
        gpu_memory_fraction=rollout.gpu_memory_fraction,
        kv_cache_bytes=rollout.kv_cache_bytes,
        seed=config.run.seed,
        collective_minutes=config.run.collective_minutes,
        rank=layout.rank,
        world_size=layout.world_size,
        job_id=broadcast_object(uuid4().hex),
        seeded=rollout.seeded,
        deep_sleep=rollout.deep_sleep,
        speculative=rollout.speculative,
        notes_routing=config.train.routing_replay,
    )
