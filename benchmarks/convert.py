"""Seconds of a conversion, against loading and saving the same tensors with safetensors.

    python benchmarks/convert.py [--config CONFIG_JSON]

Makes a model of random bfloat16 weights (by default of the shape of
R1-Distill-Qwen-1.5B, about 3.5 GB), converts it both ways, each time in a process of its own, and
copies its shards with `load_file` and `save_file`, disk sync included in all. The three take turns.
Prints one JSON line: medians of the seconds, the ratio of each direction, peak memory.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from shapes import CONFIGS

from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.hf_writer import hf_layout
from megatron_opsft.models.weights.rules import WeightTable

ROOT = Path(__file__).parents[1]
SHARD_BYTES = 2_000_000_000


def make_model(directory: Path, config_file: Path) -> None:
    """Random weights under the names and shapes of the config."""
    directory.mkdir()
    config = json.loads(config_file.read_text()) | {"torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    table = WeightTable(read_model_shape(directory))
    shapes = table.hf_shapes()
    layout = hf_layout(shapes, dict.fromkeys(shapes, torch.bfloat16), SHARD_BYTES)
    generator = torch.Generator().manual_seed(0)
    largest = max(math.prod(shape) for shape in shapes.values())
    pool = torch.randn(min(2**24, largest), generator=generator).bfloat16()
    for file in layout.files:
        tensors = {}
        for number, target in enumerate(layout.targets):
            if target.region.path.name == file.name:
                shape = torch.Size(shapes[target.name])
                turned = pool.roll(number * 7919)
                flat = turned.repeat(-(-shape.numel() // turned.numel()))[: shape.numel()]
                tensors[target.name] = flat.view(shape).clone()
        save_file(tensors, directory / file.name, metadata={"format": "pt"})
    for name, content in layout.small_files.items():
        (directory / name).write_bytes(content)


def floor_seconds(source: Path, out: Path) -> float:
    """Load and save the shards with safetensors, sync included."""
    out.mkdir()
    started = time.perf_counter()
    for file in sorted(source.glob("*.safetensors")):
        save_file(load_file(file), out / file.name, metadata={"format": "pt"})
        with open(out / file.name, "rb") as copy:
            os.fsync(copy)
    return time.perf_counter() - started


def run_conversion(arguments: list[str | Path]) -> dict[str, float]:
    """The figures that the converter prints."""
    command = [sys.executable, str(ROOT / "tools/convert_hf.py"), *arguments, "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return json.loads(ended.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    r1_distill = CONFIGS / "DeepSeek-R1-Distill-Qwen-1.5B/config.json"
    parser.add_argument("--config", type=Path, default=r1_distill, help="of another model")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {"floor": [], "to-megatron": [], "to-hf": []}
    peaks: list[float] = []
    num_bytes = 0
    with tempfile.TemporaryDirectory() as name:
        hf, megatron, back = (Path(name) / part for part in ("hf", "megatron", "back"))
        make_model(hf, args.config)
        for _ in range(args.repeats):
            for path in (megatron, back, Path(name) / "floor"):
                shutil.rmtree(path, ignore_errors=True)
            os.sync()
            seconds["floor"].append(floor_seconds(hf, Path(name) / "floor"))
            for direction in (
                ["to-megatron", "--hf", hf, "--out", megatron],
                ["to-hf", "--megatron", megatron, "--out", back],
            ):
                os.sync()
                figures = run_conversion(direction)
                seconds[str(direction[0])].append(figures["seconds"])
                peaks.append(figures["peak_rss_mb"])
                num_bytes = int(figures["bytes"])
    median = {key: statistics.median(values) for key, values in seconds.items()}
    slower = max(median["to-megatron"], median["to-hf"])
    result = {
        "benchmark": "convert",
        "bytes": num_bytes,
        "seconds": slower,
        "floor_seconds": round(median["floor"], 3),
        "ratio": round(slower / median["floor"], 3),
        "to_megatron_seconds": median["to-megatron"],
        "to_hf_seconds": median["to-hf"],
        "peak_rss_mb": max(peaks),
        "repeats": args.repeats,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
