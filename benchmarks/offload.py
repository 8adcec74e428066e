"""What `train.offload` frees while an engine samples, and what its copies cost.

    python benchmarks/offload.py [--shape NAME] [--ranks N] [--tp N] [--repeats N]

A trainer with random weights sleeps and wakes at each level in turn. Prints a JSON line for each:
GB of the trainer on its device awake and asleep (on a GPU as torch's allocator counts them), median
seconds of a sleep without a weight sync to hide copies behind, and of waking; and GB a second.
Nothing is lost: checksums before and after are compared.
"""

import argparse
import statistics
from typing import Any, get_args

import torch
from ranks import (
    end_with,
    join_ranks,
    measured,
    random_trainer,
    rank_parser,
    run_main,
    start_ranks,
)
from shapes import SHAPES

from megatron_opsft.config import ParallelConfig, TrainConfig
from megatron_opsft.config.training import OffloadLevel
from megatron_opsft.runtime.device import Device
from megatron_opsft.trainer.model.offload import Offload
from megatron_opsft.trainer.model.step import Trainer


def held_bytes(device: Device, trainer: Trainer, offload: Offload) -> int:
    """Bytes on the device now; on a CPU those that a GPU would have."""
    if device.is_cuda:
        return int(torch.get_device_module().memory_allocated())
    everything = Offload(trainer, "all")
    everything.sleep()
    whole = sum(everything.bytes_away.values())
    everything.wake()
    return whole - sum(offload.bytes_away.values())


def checksum(trainer: Trainer) -> float:
    """Of all weights."""
    parameters = (p for model in trainer.models for p in model.parameters())
    return float(sum(parameter.detach().double().sum() for parameter in parameters))


def measure_level(
    device: Device, trainer: Trainer, level: OffloadLevel, repeats: int
) -> dict[str, Any]:
    """The line of one level."""
    offload = Offload(trainer, level)
    before, awake = checksum(trainer), held_bytes(device, trainer, offload)
    offload.sleep()  # the first one pins memory
    offload.wake()
    sleeps, wakes, asleep, copied = [], [], 0, 0
    for _ in range(repeats):
        sleeps.append(measured(device, offload.sleep)[0])
        away = offload.bytes_away
        copied = away["optimizer"] + away["weights"]
        asleep = awake - sum(away.values())
        if device.is_cuda:
            asleep = held_bytes(device, trainer, offload)
        wakes.append(measured(device, offload.wake)[0])
    assert checksum(trainer) == before, f"{level} has changed weights"
    sleep, wake = statistics.median(sleeps), statistics.median(wakes)
    return {
        "offload": level,
        "awake_gb": round(awake / 1e9, 6),
        "asleep_gb": round(asleep / 1e9, 6),
        "sleep_seconds": round(sleep, 5),
        "wake_seconds": round(wake, 5),
        "gb_per_second": round(2 * copied / 1e9 / (sleep + wake), 3),
    }


def measure(args: argparse.Namespace) -> None:
    """Called by every rank."""
    parallel = ParallelConfig(tp=args.tp, sequence_parallel=args.tp > 1)
    device, layout = join_ranks(args.device, parallel)
    shape = SHAPES[args.shape]
    trainer = random_trainer(shape, args.dtype, parallel, TrainConfig(), device, layout)
    about = {"shape": args.shape, "dtype": args.dtype, "device": device.torch_device.type}
    levels = get_args(OffloadLevel)
    lines = [about | measure_level(device, trainer, level, args.repeats) for level in levels]
    end_with(layout, lines)


def main() -> None:
    parser = rank_parser(__doc__, dtype="bfloat16", repeats=3)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    start_ranks(args.ranks)
    measure(args)


if __name__ == "__main__":
    run_main(main)
