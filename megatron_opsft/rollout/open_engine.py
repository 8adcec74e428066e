"""Build the rollout engine of a configuration. A new kind of engine needs a row in `limits` and a
case in `build_engine`.
"""

from pathlib import Path
from uuid import uuid4

from megatron_opsft.config import Config
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.rollout.engine import EngineSettings, RolloutEngine
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.rollout.limits import max_engine_tokens
from megatron_opsft.rollout.requests import Decoder
from megatron_opsft.rollout.vllm.engine import VllmEngine
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.distributed import Layout, broadcast_object


def build_engine(
    name: str,
    settings: EngineSettings,
    table: WeightTable,
    tokenizer: Decoder,
    device: Device,
) -> RolloutEngine:
    """Build an engine on the ranks of this job, without weights; called by every rank.

    Errors: `UserError` for a model that the engine refuses.
    """
    if name == "vllm":
        return VllmEngine(settings, table, tokenizer)
    return HfEngine.from_settings(settings, tokenizer, device.torch_device)


def open_engine(
    config: Config,
    model_dir: Path,
    tokenizer: Decoder,
    table: WeightTable,
    device: Device,
    layout: Layout,
) -> RolloutEngine:
    """Build a run's engine, without weights. Every rank calls it after the groups were made."""
    rollout = config.rollout
    settings = EngineSettings(
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
    return build_engine(
        rollout.engine,
        settings,
        table,
        tokenizer,
        device,
    )
