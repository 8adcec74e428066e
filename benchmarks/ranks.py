"""What the benchmarks over several ranks share: starting, measuring, ending with one clear line."""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_opsft.commands.plan.assumptions import load_hardware
from megatron_opsft.config import OptimizerConfig, ParallelConfig, TrainConfig
from megatron_opsft.errors import UserError
from megatron_opsft.methods.objective import aggregate
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.records import MicroBatch, Sample
from megatron_opsft.run.start.checked_run import check_world
from megatron_opsft.runtime.device import Device, peak_memory_bytes, select_device
from megatron_opsft.runtime.distributed import (
    Layout,
    gather_from_all,
    start_distributed,
    stop_distributed,
)
from megatron_opsft.runtime.launched import launched_ranks
from megatron_opsft.trainer.batching.microbatch import pack, plan_packs
from megatron_opsft.trainer.loss.loss_memory import CrossEntropyKind
from megatron_opsft.trainer.model.build import build_model, wrap_for_training
from megatron_opsft.trainer.model.optimizer import build_optimizer
from megatron_opsft.trainer.model.step import Trainer
from megatron_opsft.trainer.model.transformer_config import transformer_config


def rank_parser(doc: str | None, *, dtype: str, repeats: int) -> argparse.ArgumentParser:
    """The options that all these benchmarks have; dtype, repeats: their defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=dtype)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--repeats", type=int, default=repeats)
    return parser


def start_ranks(count: int) -> None:
    """Become torchrun with `count` processes of this very command; inside it nothing is to do."""
    if count > 1 and "WORLD_SIZE" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
        torchrun += ["--nproc-per-node", str(count)]
        os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])


def own_process(name: str, directory: Path, threads: int) -> tuple[list[str], dict[str, str]]:
    """Command and environment of this very script for one contender alone, in its directory."""
    command = [sys.executable, *sys.argv, "--only", name, "--directory", str(directory)]
    return command, os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def join_ranks(device_name: str, parallel: ParallelConfig) -> tuple[Device, Layout]:
    """The device of this rank, and its place after all ranks have made Megatron's groups."""
    check_world(launched_ranks(), parallel)
    device = select_device(device_name)
    if not device.is_cuda:
        from megatron_opsft.runtime import cpu_compat

        cpu_compat.install()
    return device, start_distributed(device, parallel)


def forget_peak(device: Device) -> int:
    """From here on `peak_memory_bytes` is that of what follows; bytes now."""
    if device.is_cuda:
        torch.get_device_module().reset_peak_memory_stats()
        return int(torch.get_device_module().memory_allocated())
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory_bytes(device)


def measured(device: Device, act: Callable[[], Any]) -> tuple[float, int]:
    """Seconds of the slowest rank, and the extra memory of the rank that took most."""
    gather_from_all([0])
    device.synchronize()
    before = forget_peak(device)
    start = time.perf_counter()
    act()
    device.synchronize()
    elapsed = time.perf_counter() - start
    everyone = gather_from_all([(elapsed, peak_memory_bytes(device) - before)])
    return max(seconds for seconds, _ in everyone), max(extra for _, extra in everyone)


def measured_in_turn(
    device: Device, acts: Mapping[Any, Callable[[], Any]], repeats: int, *, uncounted: int = 0
) -> dict[Any, tuple[float, int]]:
    """Of each: the median of the seconds, and the most extra memory. They take turns, so that the
    machine's drift hits all alike; uncounted: repeats before those that count.
    """
    found: dict[Any, list[tuple[float, int]]] = {name: [] for name in acts}
    for _ in range(uncounted + repeats):
        for name, act in acts.items():
            found[name].append(measured(device, act))
    counted = {name: values[uncounted:] for name, values in found.items()}
    return {
        name: (statistics.median(s for s, _ in values), max(extra for _, extra in values))
        for name, values in counted.items()
    }


def build_chunks(
    shape: ModelShape, dtype: str, parallel: ParallelConfig, train: TrainConfig, device: Device
) -> tuple[Any, Any, Any]:
    """Megatron's model with random weights, wrapped for training; its optimizer and config."""
    config = transformer_config(shape, dtype=dtype, parallel=parallel, train=train, device=device)
    models = build_model(shape, config, device)
    for parameter in (parameter for model in models for parameter in model.parameters()):
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.02)
        else:
            parameter.data.fill_(1.0)
    chunks = wrap_for_training(models, config, parallel)
    return chunks, build_optimizer(chunks, OptimizerConfig(), bf16=config.bf16), config


def random_trainer(
    shape: ModelShape,
    dtype: str,
    parallel: ParallelConfig,
    train: TrainConfig,
    device: Device,
    layout: Layout,
    cross_entropy: CrossEntropyKind = "fused_linear",
) -> Trainer:
    """A trainer of the model of `build_chunks`."""
    chunks, optimizer, config = build_chunks(shape, dtype, parallel, train, device)
    return Trainer(
        chunks=chunks,
        optimizer=optimizer,
        config=config,
        layout=layout,
        vocab_size=shape.vocab_size,
        cross_entropy=cross_entropy,
    )


def pack_accepted(
    samples: Sequence[Sample],
    accepted: Sequence[bool],
    parallel: ParallelConfig,
    *,
    budget: int,
    device: torch.device,
    dp_rank: int = 0,
    dp_size: int = 1,
    quadratic_at: float = 8192.0,
) -> tuple[list[MicroBatch], float]:
    """As a step packs them: this rank's micro-batches, and the factor of the loss.

    budget, quadratic_at: see `plan_packs`.
    """
    lengths = [len(sample.response_ids) for sample in samples]
    token_weights, factor = aggregate("max_accepted", lengths, accepted, limit=0)
    kept = [number for number, flag in enumerate(accepted) if flag]
    plan, _ = plan_packs(
        [len(samples[n].prompt_ids) + lengths[n] for n in kept],
        parallel,
        budget=budget,
        dp_size=dp_size,
        quadratic_at=quadratic_at,
    )
    batches = pack(
        plan[dp_rank],
        {i: samples[n] for i, n in enumerate(kept)},
        [token_weights[n] for n in kept],
        parallel,
        device=device,
    )
    return batches, factor


def peak_flops(device: Device) -> float | None:
    """bfloat16 operations a second of this rank's GPU at most; None where no plan knows it."""
    name = torch.get_device_module().get_device_name().lower() if device.is_cuda else ""
    models = ("h100", "h200", "a100", "b200")
    return next((load_hardware(m).peak_flops for m in models if m in name), None)


def end_with(layout: Layout, lines: Iterable[Mapping[str, Any]]) -> None:
    """Leave the job; rank 0 prints the lines as JSON."""
    stop_distributed()
    if layout.is_main:
        for line in lines:
            print(json.dumps(line))


def run_main(main: Callable[[], None]) -> None:
    """Bad input: one line on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
