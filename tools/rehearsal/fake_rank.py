"""One rank of a large job in this process, its model without memory: meta tensors on a fake process
group of the whole world.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_opsft.config import TrainConfig
from megatron_opsft.model.build import build_model, wrap_for_training
from megatron_opsft.model.transformer_config import transformer_config
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.distributed import Layout, make_groups, stop_distributed


@contextmanager
def fake_rank(job: TrainingJob, rank: int) -> Iterator[Layout]:
    """Inside, this process is one rank of the job's world, whose other ranks are not there."""
    dist.init_process_group("fake", rank=rank, world_size=job.world_size, store=FakeStore())
    try:
        yield make_groups(job.parallel)
    finally:
        stop_distributed()


def build_buffers(job: TrainingJob, device: Device) -> tuple[list[Any], list[Any], list[Any]]:
    """The model chunks of the rank that this process is, and Megatron's buffers of their weights
    and main gradients: those of all, and those of experts that expert parallelism shares out.
    """
    config = transformer_config(
        job.shape,
        dtype=job.config.model.dtype,
        parallel=job.parallel,
        # Recomputation changes no shape; offloading needs TransformerEngine.
        train=TrainConfig(),
        device=device,
    )
    models = build_model(job.shape, config, device)
    chunks = wrap_for_training(models, config, job.parallel)
    experts = [buffer for chunk in chunks for buffer in chunk.expert_parallel_buffers]
    return models, [buffer for chunk in chunks for buffer in chunk.buffers], experts
