"""The rollout engine that a configuration asks for."""

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import torch

from megatron_opsft.config import Config
from megatron_opsft.rollout.engine import Replica, RolloutEngine
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.rollout.limits import (
    check_engine_settings,
    check_separate,
    max_engine_tokens,
)
from megatron_opsft.rollout.remote.engine import RemoteEngine
from megatron_opsft.rollout.remote.gpus import NodeRank, check_engine_gpus
from megatron_opsft.rollout.responses import Decoder
from megatron_opsft.rollout.vllm.core import VllmSettings, check_installed
from megatron_opsft.rollout.vllm.engine import VllmEngine
from megatron_opsft.runtime.device import Device, num_gpus
from megatron_opsft.runtime.distributed import Layout, broadcast_object
from megatron_opsft.weights.rules import WeightTable


def check_engine(config: Config) -> None:
    """Errors: `UserError` for settings that contradict each other and for a missing vLLM."""
    check_engine_settings(config.rollout)
    if config.rollout.engine == "vllm":
        check_installed()


def check_gpus(config: Config, device: Device) -> None:
    """Errors: `UserError` where separate engines would take GPUs that this node does not have."""
    if device.is_cuda and config.rollout.placement == "separate":
        rollout = config.rollout
        node = NodeRank.of_this_process()
        check_separate(rollout.num_engines, node.world_size)
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
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.dtype]
    if config.rollout.engine == "hf":
        return HfEngine.from_config(
            model_dir,
            tokenizer,
            dtype=dtype,
            device=device.torch_device,
            batch_size=config.rollout.batch_size,
            replica=Replica(
                index=layout.rank, count=layout.world_size, batch_size=config.rollout.batch_size
            ),
            # How many ranks share the work decides which responses share a batch.
            exact=config.model.dtype == "float32",
        )
    settings = VllmSettings(
        model_dir=model_dir,
        dtype=config.model.dtype,
        is_cuda=device.is_cuda,
        tp=config.rollout.tp,
        max_tokens=max_engine_tokens(config),
        batch_size=config.rollout.batch_size,
        gpu_memory_fraction=config.rollout.gpu_memory_fraction,
        kv_cache_bytes=config.rollout.kv_cache_bytes,
        seed=config.run.seed,
        collective_minutes=config.run.collective_minutes,
        under_launcher=config.rollout.placement == "colocated",
        job_id=broadcast_object(uuid4().hex),
    )
    if config.rollout.placement == "separate":
        return RemoteEngine(
            settings,
            table,
            tokenizer,
            layout,
            device,
            num_engines=config.rollout.num_engines,
            timeout_seconds=config.rollout.engine_timeout_seconds,
            log_dir=config.run.dir,
            bucket_bytes=config.sync.bucket_mb * 2**20,
            push_again=push_again,
        )
    return VllmEngine(settings, table, tokenizer, rank=layout.rank, world_size=layout.world_size)
