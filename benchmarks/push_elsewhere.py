"""Bytes a second of a push to an engine on another node, against a plain send of the same bytes.

    torchrun --nproc-per-node 2 benchmarks/push_elsewhere.py [--shape 46m|1.5b] [--repeats N]

Rank 0 holds Megatron's shards of a model with random weights, rank 1 an engine's parameters in
vLLM's layout, and both a spanning group as between nodes. In turn: all weights pushed in place; the
same bytes by one `send` over the job's own group; after one element in fifty was changed, the same
push as a delta. Prints one JSON line: medians, bytes, ratios to the plain send.
"""

import argparse
import json
import statistics
from typing import Any

import torch
import torch.distributed as dist
from push import build_shards
from ranks import join_ranks, measured, run_main
from shapes import SHAPES

from megatron_opsft.config import ParallelConfig, SyncConfig
from megatron_opsft.runtime.distributed import broadcast_object, stop_distributed
from megatron_opsft.runtime.spanning_group import SpanningGroup, address_towards, open_meeting
from megatron_opsft.sync.in_place import trainer_placements
from megatron_opsft.transfer.delta import as_bits
from megatron_opsft.transfer.transfer import Transfer
from megatron_opsft.weights.reshard import Placement
from megatron_opsft.weights.schedule import make_schedule
from megatron_opsft.weights.vllm_layout import vllm_parameters


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The numbers of the JSON line; called by both ranks."""
    device, layout = join_ranks("cpu", ParallelConfig())
    shards = build_shards(SHAPES[args.shape], args.dtype, ParallelConfig(), device, layout)
    invitation, listener = open_meeting("", 2, 60.0) if layout.is_main else (None, None)
    meeting: Any = broadcast_object(invitation)
    own_host = address_towards(meeting.host)
    group = SpanningGroup(meeting, layout.rank, device.torch_device, own_host, listener)
    parameters = vllm_parameters(shards.table, 0, 1)
    held = trainer_placements(shards)[0].parameters
    program = make_schedule(
        [Placement((0,), held)],
        [Placement((1,), parameters)],
        itemsize=shards.dtype.itemsize,
        world_size=2,
        bucket_bytes=args.bucket_mb * 2**20,
    ).program(layout.rank)
    targets = {p.name: torch.zeros(p.shape, dtype=shards.dtype) for p in parameters}
    whole = Transfer(program, shards.by_name, targets, group)
    delta = Transfer(program, shards.by_name, targets, group, delta=True)
    size = sum(tensor.numel() for tensor in targets.values())
    flat = torch.zeros(size, dtype=shards.dtype)

    def plain() -> None:
        (dist.send if layout.is_main else dist.recv)(flat, 1 - layout.rank)

    delta.run()
    seconds: dict[str, list[float]] = {"plain": [], "push": [], "delta": []}
    for _ in range(args.repeats):
        seconds["plain"].append(measured(device, plain)[0])
        seconds["push"].append(measured(device, whole.run)[0])
        for tensor in shards.by_name.values():
            as_bits(tensor).view(-1)[::50] ^= 1
        seconds["delta"].append(measured(device, delta.run)[0])
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    result = {
        "shape": args.shape,
        "dtype": args.dtype,
        "model_bytes": size * shards.dtype.itemsize,
        "delta_bytes": delta.bytes_sent,
        **{f"{name}_seconds": round(value, 4) for name, value in medians.items()},
        "push_to_plain": round(medians["plain"] / medians["push"], 3),
        "delta_to_plain": round(medians["plain"] / medians["delta"], 3),
    }
    is_main = layout.is_main
    group.close()
    stop_distributed()
    return result if is_main else {}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="46m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--bucket-mb", type=int, default=SyncConfig().bucket_mb)
    parser.add_argument("--repeats", type=int, default=9)
    if result := measure(parser.parse_args()):
        print(json.dumps(result))


if __name__ == "__main__":
    run_main(main)
