"""The rollout engine that a configuration asks for. A new kind of engine is a row in `traits` and
a case in `open_colocated`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import torch

from megatron_opsft.config import Config
from megatron_opsft.rollout.engine import (
    EngineSettings,
    Replica,
    RolloutEngine,
)
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.rollout.hf.speculation import Speculation
from megatron_opsft.rollout.limits import max_engine_tokens
from megatron_opsft.rollout.remote.addresses import parse_address
from megatron_opsft.rollout.remote.engine import RemoteEngine
from megatron_opsft.rollout.remote.gpus import NodeRank, check_engine_gpus
from megatron_opsft.rollout.remote.keys import read_token
from megatron_opsft.rollout.remote.starts import Elsewhere
from megatron_opsft.rollout.responses import Decoder
from megatron_opsft.rollout.vllm.engine import VllmEngine
from megatron_opsft.runtime.device import Device, num_gpus
from megatron_opsft.runtime.distributed import Layout, broadcast_object
from megatron_opsft.weights.rules import WeightTable


class ColocatedEngine(RolloutEngine, Protocol):
    """An engine inside the training ranks."""

    tokenizer: Decoder


def open_colocated(
    name: str,
    settings: EngineSettings,
    table: WeightTable,
    tokenizer: Decoder,
    device: Device,
    *,
    rank: int,
    world_size: int,
) -> ColocatedEngine:
    """An engine over the ranks of this job, without weights; called by every rank.

    Errors: `UserError` for a model that the engine refuses.
    """
    match name:
        case "hf":
            return HfEngine.from_config(
                settings.model_dir,
                tokenizer,
                dtype=getattr(torch, settings.dtype),
                device=device.torch_device,
                batch_size=settings.batch_size,
                replica=Replica(numbers=(rank,), count=world_size, batch_size=settings.batch_size),
                # How many ranks share the work decides which responses share a batch.
                exact=settings.dtype == "float32",
                speculation=Speculation.of(settings.speculation),
            )
        case "vllm":
            return VllmEngine(settings, table, tokenizer, rank=rank, world_size=world_size)
    raise ValueError(f"there is no engine {name}")


def _elsewhere(config: Config) -> Elsewhere | None:
    rollout = config.rollout
    if not rollout.engines:
        return None
    return Elsewhere(
        addresses=tuple(parse_address(text, "rollout.engines") for text in rollout.engines),
        token=read_token(rollout.engine_token_file),
    )


def check_gpus(config: Config, device: Device) -> None:
    """Errors: `UserError` where separate engines would take GPUs that this node does not have."""
    rollout = config.rollout
    if device.is_cuda and rollout.placement == "separate" and not rollout.engines:
        node = NodeRank.of_this_process()
        check_engine_gpus(node, rollout.num_engines, rollout.tp, num_gpus())


def open_engine(
    config: Config,
    model_dir: Path,
    tokenizer: Decoder,
    table: WeightTable,
    device: Device,
    layout: Layout,
    push_again: Callable[[], object],
) -> RolloutEngine:
    """Called by every rank after the process groups were made; the engine holds no weights yet.

    push_again: gives the engine the current weights once more, where it had to be replaced.
    """
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
        under_launcher=rollout.placement == "colocated",
        job_id=broadcast_object(uuid4().hex),
        speculation=rollout.speculation,
        draft_model=rollout.draft_model,
        draft_tokens=rollout.draft_tokens,
        engine=rollout.engine,
    )
    if rollout.placement == "separate":
        return RemoteEngine(
            settings,
            table,
            tokenizer,
            layout,
            device,
            num_engines=rollout.num_separate,
            timeout_seconds=rollout.engine_timeout_seconds,
            log_dir=config.run.dir,
            bucket_bytes=config.sync.bucket_mb * 2**20,
            push_again=push_again,
            elsewhere=_elsewhere(config),
        )
    return open_colocated(
        rollout.engine,
        settings,
        table,
        tokenizer,
        device,
        rank=layout.rank,
        world_size=layout.world_size,
    )
