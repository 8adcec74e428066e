"""Megatron's own model, gradient buffers and optimizer shards of every distinct rank, without
memory: meta tensors on a fake process group of the whole world.

The only file of a plan that needs Megatron. Distinct are the pipeline stages: tensor-parallel and
data-parallel peers hold tensors of the same shapes (which `tests/unit/test_plan_ranks.py` checks).
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_opsft.architectures.template import Rule
from megatron_opsft.config import TrainConfig
from megatron_opsft.errors import UserError
from megatron_opsft.model.build import build_model, wrap_for_training
from megatron_opsft.model.shards import ModelShards
from megatron_opsft.model.transformer_config import transformer_config
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.memory import Stage
from megatron_opsft.runtime import cpu_compat
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.distributed import Layout, make_groups, stop_distributed
from megatron_opsft.weights.rules import WeightTable


def build_stages(job: TrainingJob) -> list[Stage]:
    """Every pipeline stage, on its rank with tensor- and data-parallel rank 0.

    Errors: `UserError` inside a process group, and where the parts do not add up to the Hugging
    Face model.
    """
    if dist.is_initialized():
        raise UserError("a plan is made by one process of its own, not under torchrun")
    cpu_compat.install()
    table = WeightTable(job.shape, "local", job.parallel.tp)
    per_stage = job.world_size // job.parallel.pp
    stages = [build_stage(job, stage * per_stage, table) for stage in range(job.parallel.pp)]
    counted = sum(stage.whole_parameters for stage in stages)
    wanted = sum(prod(shape) for shape in table.hf_shapes().values())
    if counted != wanted:
        raise UserError(
            f"the ranks hold {counted} parameters of the model, but config.json means {wanted}"
        )
    return stages


def build_stage(job: TrainingJob, rank: int, table: WeightTable) -> Stage:
    """What one global rank holds. `cpu_compat` is installed."""
    with fake_rank(job, rank) as layout, cpu_compat.without_memory() as meta:
        models, *kinds = build_buffers(job, Device(torch_device=meta, backend="fake"))
        buffers = list(itertools.chain(*kinds))
        shards = ModelShards.of(models, table, layout)
        shared_out = [p for rule, p in shards.parameters if rule.is_expert and layout.ep_size > 1]
        state = 12 if job.dtype_bytes == 2 else 8  # two moments; float32 main weights of bfloat16
        return Stage(
            index=layout.pp_rank,
            num_layers=sum(len(model.decoder.layers) for model in models),
            has_embedding=any(model.pre_process for model in models),
            has_output=any(model.post_process for model in models),
            num_parameters=sum(p.numel() for model in models for p in model.parameters()),
            expert_parameters=sum(parameter.numel() for parameter in shared_out),
            whole_parameters=sum(whole_numel(rule, layout) for rule, _ in shards.parameters),
            weight_bytes=sum(buffer.param_data.nbytes for buffer in buffers),
            gradient_bytes=sum(buffer.grad_data.nbytes for buffer in buffers),
            optimizer_bytes=sum(int(per_peer(kind).max()) for kind in kinds if kind) * state,
        )


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


@contextmanager
def fake_rank(job: TrainingJob, rank: int) -> Iterator[Layout]:
    """Inside, this process is one rank of the job's world, whose other ranks are not there."""
    dist.init_process_group("fake", rank=rank, world_size=job.world_size, store=FakeStore())
    try:
        yield make_groups(job.parallel)
    finally:
        stop_distributed()


def whole_numel(rule: Rule, layout: Layout) -> int:
    """Elements of the Hugging Face model behind a parameter, and behind those that its
    expert-parallel peers have in its place; none behind a copy of another one.
    """
    peers = layout.ep_size if rule.is_expert else 1
    return 0 if rule.replica else peers * sum(prod(shape) for shape in rule.hf_shapes)


def per_peer(buffers: list[Any]) -> Any:
    """Elements that each data-parallel rank updates, int64 [dp]: the overlap of its equal part of
    every bucket with the parameters that lie in it. buffers: shared by equally many ranks.
    """
    total: Any = 0
    for buffer in buffers:
        size = buffer.data_parallel_world_size
        spans = sorted((start, stop) for start, stop, _ in buffer.param_index_map.values())
        borders = np.array(list(itertools.chain.from_iterable(spans)))
        lengths = np.array([stop - start for start, stop in spans])
        # Elements of parameters before each border: it grows inside of one, and not between two.
        before = np.repeat(np.concatenate([[0], np.cumsum(lengths)]), 2)[1:-1]
        for start, stop in buffer.bucket_indices:
            edges = np.linspace(start, stop, size + 1)
            total = total + np.diff(np.interp(edges, borders, before))
    return np.rint(total).astype(np.int64)
