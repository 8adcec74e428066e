"""Bytes a second of a push of all weights, against a plain copy of the same bytes in the same run.

    python benchmarks/push.py [--shape NAME] [--tp N --pp N --rollout-tp N] [--repeats N]
    torchrun --nproc-per-node N benchmarks/push.py --tp N ...

Builds Megatron's shards of a model with random weights and an engine that has vLLM's layout but
does nothing else, and pushes by both ways in turn: in place (slices written into the engine's
parameters) and as a stream (whole tensors, which the engine cuts up and copies, as vLLM's loader
does). The plain copy is one `copy_` for every engine parameter. Prints one JSON line: medians of
the slowest rank, their ratios to the copy, and the extra memory at the peak of a push against two
buckets. On a GPU the same line gives the seconds there.
"""

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from ranks import end_with, join_ranks, measured_in_turn, rank_parser, run_main
from shapes import SHAPES
from torch import Tensor

from megatron_opsft.config import ParallelConfig, SyncConfig, TrainConfig
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.weights.rectangles import Copy
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.rollout.engine import EngineShare
from megatron_opsft.rollout.vllm.weights import vllm_layout
from megatron_opsft.run.sync.weight_sync import WeightSync
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.distributed import Layout
from megatron_opsft.trainer.model.build import build_model
from megatron_opsft.trainer.model.shards import ModelShards
from megatron_opsft.trainer.model.transformer_config import (
    transformer_config,
    uses_transformer_engine,
)


class LayoutEngine:
    """The weights' side of a rollout engine: vLLM's parameters on this rank, and nothing else."""

    def __init__(self, table: WeightTable, tp: int, layout: Layout, like: Tensor) -> None:
        self.layout = vllm_layout(table, tp, layout.rank % tp)
        self.share = EngineShare(index=layout.rank // tp, count=layout.world_size // tp)
        self._parts: dict[str, list[tuple[Copy, Tensor]]] = {}
        self.tensors: dict[str, Tensor] = {}
        for parameter in self.layout.parameters_of(self.layout.tp_rank):
            tensor = torch.zeros(parameter.shape, dtype=like.dtype, device=like.device)
            self.tensors[parameter.name] = tensor
            for part in parameter.copies:
                self._parts.setdefault(part.source.tensor, []).append((part, tensor))

    def copy_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Cut every whole tensor up and copy what this rank needs."""
        for name, tensor in tensors:
            for part, own in self._parts.get(name, ()):
                part.target.view(own).copy_(part.source.view(tensor))

    def begin_update(self) -> None:
        """Nothing."""

    def finish_update(self, version: int) -> None:
        """Nothing."""

    def weights(self) -> dict[str, Tensor]:
        """All of them, live."""
        return self.tensors

    def draft_fault(self) -> str:
        """There is no draft."""
        return ""


def build_shards(
    shape: ModelShape, dtype: str, parallel: ParallelConfig, device: Device, layout: Layout
) -> ModelShards:
    """Megatron's model with random weights, without gradients and optimizer."""
    config = transformer_config(
        shape, dtype=dtype, parallel=parallel, train=TrainConfig(), device=device
    )
    names = "te" if uses_transformer_engine(device, dtype) else "local"
    models = build_model(shape, config, device)
    shards = ModelShards.of(models, WeightTable(shape, names, parallel.tp), layout)
    seed = torch.Generator(device.torch_device).manual_seed(0)
    pool = torch.randn(2**22, generator=seed, device=device.torch_device).to(shards.dtype)
    for rule, parameter in shards.parameters:
        flat = parameter.view(-1)
        for start in range(0, flat.numel(), pool.numel()):
            part = flat[start : start + pool.numel()]
            part.copy_(pool[: part.numel()])
        if rule.kind.value == "vocabulary":  # as after loading: padding is zero
            parameter[shape.vocab_size :].zero_()
    return shards


def measure(args: argparse.Namespace) -> None:
    """Called by every rank."""
    parallel = ParallelConfig(tp=args.tp, pp=args.pp)
    device, layout = join_ranks(args.device, parallel)
    shards = build_shards(SHAPES[args.shape], args.dtype, parallel, device, layout)
    like = shards.parameters[0][1]
    engine = LayoutEngine(shards.table, args.rollout_tp, layout, like)
    config = SyncConfig(verify="off", bucket_mb=args.bucket_mb)
    sync = WeightSync(shards, engine, config, score=lambda samples: [])  # type: ignore[arg-type]
    sync.push(0)
    acts: dict[str, Callable[[], Any]] = {
        "in_place": partial(sync.push, 1),
        "stream": lambda: engine.copy_weights(sync.exporter.stream()),
        "checksums": partial(sync.compare_checksums, "push"),
    }
    sources = [torch.ones_like(t) for t in engine.tensors.values()]
    targets = [torch.ones_like(t) for t in engine.tensors.values()]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    found = measured_in_turn(device, {"copy": copy, **acts}, args.repeats)
    medians = {name: seconds for name, (seconds, _) in found.items()}
    engine_bytes = sum(t.numel() * t.itemsize for t in engine.tensors.values())
    result = {
        "shape": args.shape,
        "device": str(device.torch_device.type),
        "world_size": layout.world_size,
        "tp": args.tp,
        "pp": args.pp,
        "rollout_tp": args.rollout_tp,
        "engine_bytes_per_rank": engine_bytes,
        **{f"{name}_seconds": round(value, 4) for name, value in medians.items()},
        **{
            f"{name}_gb_per_second": round(engine_bytes / medians[name] / 1e9, 2)
            for name in ("copy", "in_place", "stream")
        },
        **{
            f"{name}_to_copy": round(medians["copy"] / medians[name], 3)
            for name in ("in_place", "stream")
        },
        "in_place_extra_mib": round(found["in_place"][1] / 2**20, 1),
        "stream_extra_mib": round(found["stream"][1] / 2**20, 1),
        "two_buckets_mib": 2 * args.bucket_mb,
    }
    end_with(layout, [result])


def main() -> None:
    parser = rank_parser(__doc__, dtype="bfloat16", repeats=7)
    parser.add_argument("--shape", choices=SHAPES, default="46m")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--rollout-tp", type=int, default=1)
    parser.add_argument("--bucket-mb", type=int, default=256)
    measure(parser.parse_args())


if __name__ == "__main__":
    run_main(main)
