"""How long a checkpoint keeps a run waiting: written in the background, and written at once.

    python benchmarks/checkpoint.py [--shape NAME] [--ranks N] [--tp N] [--repeats N]

Saves Megatron's model and optimizer with random weights by both ways in turn. In the background:
the stall is what `start` and the `finish` after the write take, without what happens in between.
A plain copy of the same bytes in memory shows what cannot be avoided. Prints one JSON line:
medians of the slowest rank.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from ranks import (
    build_chunks,
    end_with,
    join_ranks,
    measured,
    rank_parser,
    run_main,
    start_ranks,
)
from shapes import SHAPES

from megatron_opsft.config import ParallelConfig, TrainConfig
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.distributed import broadcast_object, gather_from_all
from megatron_opsft.trainer.model.checkpoint import Checkpointer


def in_background(device: Device, saver: Checkpointer, step: int) -> tuple[float, float]:
    """Seconds of the stall, and until the checkpoint is there."""
    begin = time.perf_counter()
    stall, _ = measured(device, lambda: saver.start(step, {}))
    while saver.is_writing:
        time.sleep(0.005)
    stall += measured(device, saver.finish)[0]
    return stall, time.perf_counter() - begin


def measure(args: argparse.Namespace) -> None:
    """Called by every rank."""
    device, layout = join_ranks(args.device, ParallelConfig(tp=args.tp))
    directory = Path(broadcast_object(tempfile.mkdtemp(dir=args.dir) if layout.is_main else ""))
    parallel = ParallelConfig(tp=args.tp, sequence_parallel=args.tp > 1)
    chunks, optimizer, _ = build_chunks(
        SHAPES[args.shape], args.dtype, parallel, TrainConfig(), device
    )
    saver = Checkpointer(directory, [chunk.module for chunk in chunks], optimizer, keep=1)
    saver.save(0, {})  # the first allocates what is kept
    num_bytes = sum(path.stat().st_size for path in directory.rglob("*.distcp"))
    source = torch.ones(num_bytes // layout.world_size, dtype=torch.uint8)
    seconds: dict[str, list[float]] = {"copy": [], "at_once": [], "stall": [], "until_there": []}
    for step in range(1, 2 * args.repeats, 2):
        seconds["copy"].append(measured(device, source.clone)[0])
        seconds["at_once"].append(measured(device, lambda s=step: saver.save(s, {}))[0])
        stall, there = in_background(device, saver, step + 1)
        seconds["stall"].append(stall)
        seconds["until_there"].append(there)
    gather_from_all([0])
    if layout.is_main:
        saver.wait_for_deletion()
        shutil.rmtree(directory)
    result = {
        "shape": args.shape,
        "dtype": args.dtype,
        "device": device.torch_device.type,
        "world_size": layout.world_size,
        "tp": args.tp,
        "checkpoint_mib": round(num_bytes / 2**20, 1),
        **{f"{name}_seconds": round(statistics.median(v), 4) for name, v in seconds.items()},
    }
    end_with(layout, [result])


def main() -> None:
    parser = rank_parser(__doc__, dtype="bfloat16", repeats=5)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="where to write; by default temporary")
    args = parser.parse_args()
    start_ranks(args.ranks)
    measure(args)


if __name__ == "__main__":
    run_main(main)
