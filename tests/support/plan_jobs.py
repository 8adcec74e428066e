"""What a plan predicts is measured here, on every rank of a process group of the job's size."""

import sys
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from jobs import Built, Case, build
from live_memory import LiveMemory
from tiny_models import SHAPES

from megatron_opsft.batching.microbatch import build_microbatch
from megatron_opsft.config import Config, TrainConfig
from megatron_opsft.model.build import build_model, wrap_for_training
from megatron_opsft.model.shards import ModelShards
from megatron_opsft.model.transformer_config import transformer_config
from megatron_opsft.plan.assumptions import load_hardware
from megatron_opsft.plan.job import Job, Stage
from megatron_opsft.records import MicroBatch, Sample
from megatron_opsft.runtime import cpu_compat
from megatron_opsft.runtime.device import Device
from megatron_opsft.weights.rules import WeightTable

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from rehearse import fake_rank  # noqa: E402

_PROMPT = 1


def _response(case: Case) -> int:
    """Tokens: more where context parallelism cuts each response, which takes long with many."""
    return 31 if case.cp == 1 else 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes on one rank. activations: the most at one time in a forward and backward pass."""

    pp_rank: int
    num_parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int


def planned_job(case: Case, tokens: int) -> Job:
    """The case as a plan sees it, with micro-batches of so many tokens."""
    settings = {
        "model": {"path": "tiny_reasoner", "dtype": case.dtype},
        "data": {"train": "arithmetic", "max_prompt_tokens": _PROMPT},
        "rollout": {"max_response_tokens": _response(case)},
        "parallel": case.parallel.model_dump(),
        "train": {
            "max_tokens_per_microbatch": tokens,
            "recompute": case.recompute,
            "cross_entropy": case.cross_entropy,
        },
    }
    config = Config.model_validate(settings)
    return Job(
        config=config,
        shape=SHAPES[case.model],
        hardware=load_hardware("cpu"),
        world_size=case.world_size,
    )


def built_stages(job: Job) -> list[Stage]:
    """What the rank of every pipeline stage with tensor- and data-parallel rank 0 holds, by
    Megatron's own model, buffers and optimizer shards without memory; for a process of its own.
    """
    cpu_compat.install()
    table = WeightTable(job.shape, "local", job.parallel.tp)
    per_stage = job.world_size // job.parallel.pp
    return [_built_stage(job, stage * per_stage, table) for stage in range(job.parallel.pp)]


def _built_stage(job: Job, rank: int, table: WeightTable) -> Stage:
    meta = torch.device("meta")
    on_meta = patch.object(cpu_compat, "stands_for_cuda", meta)
    with fake_rank(job, rank) as layout, on_meta, meta:
        device = Device(torch_device=meta, backend="fake")
        config = transformer_config(
            job.shape,
            dtype=job.config.model.dtype,
            parallel=job.parallel,
            train=TrainConfig(),  # recomputation changes no shape
            device=device,
        )
        models = build_model(job.shape, config, device)
        chunks = wrap_for_training(models, config, job.parallel)
        # Buffers of weights and main gradients: of all, and of experts that are shared out.
        kinds = [
            [buffer for chunk in chunks for buffer in chunk.buffers],
            [buffer for chunk in chunks for buffer in chunk.expert_parallel_buffers],
        ]
        buffers = list(chain(*kinds))
        shards = ModelShards.of(models, table, layout).parameters
        shared_out = [p for rule, p in shards if rule.is_expert and layout.ep_size > 1]
        updated = sum(max(_updated(kind)) for kind in kinds if kind)
        state = 12 if job.dtype_bytes == 2 else 8
        return Stage(
            index=layout.pp_rank,
            num_layers=sum(len(model.decoder.layers) for model in models),
            has_output=any(model.post_process for model in models),
            num_parameters=sum(p.numel() for model in models for p in model.parameters()),
            expert_parameters=sum(parameter.numel() for parameter in shared_out),
            updated_parameters=updated,
            whole_parameters=sum(
                (layout.ep_size if rule.is_expert else 1) * sum(prod(s) for s in rule.hf_shapes)
                for rule, _ in shards
                if not rule.replica
            ),
            weight_bytes=sum(buffer.param_data.nbytes for buffer in buffers),
            gradient_bytes=sum(buffer.grad_data.nbytes for buffer in buffers),
            optimizer_bytes=updated * state,
        )


def _updated(buffers: list[Any]) -> list[int]:
    """Elements that each data-parallel rank updates: of every bucket its equal part, without the
    padding between parameters.
    """
    size = buffers[0].data_parallel_world_size
    updated = [0] * size
    for buffer in buffers:
        spans = [(start, stop) for start, stop, _ in buffer.param_index_map.values()]
        for first, last in buffer.bucket_indices:
            part = (last - first) // size
            for rank in range(size):
                low, high = first + rank * part, first + (rank + 1) * part
                updated[rank] += sum(max(0, min(high, b) - max(low, a)) for a, b in spans)
    return updated


def full_microbatch(built: Built, case: Case, tokens: int) -> MicroBatch:
    """So many tokens a rank, in short sequences."""
    vocab_size = SHAPES[case.model].vocab_size
    ids = tuple(n % vocab_size for n in range(_PROMPT + _response(case)))
    sample = Sample(
        problem_id="p", sample_index=0, prompt_ids=ids[:_PROMPT], response_ids=ids[_PROMPT:]
    )
    count = tokens * case.cp // len(ids)
    return build_microbatch(
        [sample] * count,
        [1.0] * count,
        align=1,
        device=case.device.torch_device,
        cp_rank=built.layout.cp_rank,
        cp_size=case.cp,
    )


def measure_rank(case: Case, tokens: int, num_microbatches: int) -> Measured:
    """A real pass of the trainer over full micro-batches of short sequences, and a small step."""
    built = build(case)
    trainer = built.trainer
    batch = full_microbatch(built, case, tokens)
    with LiveMemory() as memory:
        trainer.accumulate([batch] * num_microbatches, 1.0)
    trainer.step([batch] * case.pp, 1.0, lr=1e-3)
    buffers = [b for c in trainer.chunks for b in c.buffers + c.expert_parallel_buffers]
    return Measured(
        pp_rank=built.layout.pp_rank,
        num_parameters=sum(p.numel() for m in trainer.models for p in m.parameters()),
        weights=sum(b.param_data.nbytes for b in buffers),
        gradients=sum(b.grad_data.nbytes for b in buffers),
        optimizer=_optimizer_bytes(trainer.optimizer, {b.param_data.data_ptr() for b in buffers}),
        activations=memory.peak_bytes,
    )


def _optimizer_bytes(optimizer: object, buffers: set[int]) -> int:
    """Of all tensors of the state, and of main weights that are not views of the model's buffer."""
    total = 0
    for part in optimizer.chained_optimizers:  # type: ignore[attr-defined]
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                if main.untyped_storage().data_ptr() not in buffers:
                    total += main.nbytes
        for state in part.optimizer.state.values():
            total += sum(t.nbytes for name, t in state.items() if name != "step")
    return total
