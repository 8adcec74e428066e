"""The weights that a run starts from: read from disk by the trainer, or by vLLM and pulled from it.

    python benchmarks/start.py [--ranks N] [--tp N --pp N --rollout-tp N] [--hidden N --layers N]

Writes a Qwen2 with random weights, opens a session with vLLM on it, and fills the
trainer's shards by both ways in turn, each with the files dropped from the page cache before it.
On a CPU vLLM keeps linear weights as they are here (not packed for oneDNN), as on a GPU: packed
ones are read from disk. Prints one JSON line for each way: medians over the repeats of the slowest
rank's seconds and of the bytes that all ranks fetched from disks, and the extra memory at the peak
of the pull, of the rank that took most, against two buckets.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from ranks import measured, run_main, start_ranks
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_opsft.config_file import load_config
from megatron_opsft.model.load import TrainerParts
from megatron_opsft.runtime.distributed import gather_from_all
from megatron_opsft.runtime.memory import return_freed_memory
from megatron_opsft.session import Session, open_session
from megatron_opsft.storage.hf_files import HfTensors
from megatron_opsft.storage.model_paths import resolve_model
from megatron_opsft.sync.first_weights import FirstWeights, load_first_weights

CONFIG = Path(__file__).parents[1] / "examples/configs/quickstart.yaml"
TINY = resolve_model("tiny_reasoner")


def write_model(args: argparse.Namespace, directory: Path) -> None:
    """The tiny reasoner's tokenizer and a larger model."""
    shutil.copytree(TINY, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    described = AutoConfig.from_pretrained(TINY).to_dict() | {
        "hidden_size": args.hidden,
        "intermediate_size": 4 * args.hidden,
        "num_hidden_layers": args.layers,
        "layer_types": ["full_attention"] * args.layers,
        "num_attention_heads": args.hidden // 64,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**described), dtype=torch.bfloat16
    )
    model.save_pretrained(directory)


def drop_from_page_cache(session: Session) -> None:
    """The model's files are on disk alone; called by every rank."""
    if session.layout.is_main:
        for path in HfTensors(session.model_dir).files():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
    gather_from_all([0])


def fill(session: Session, *, by_engine: bool) -> FirstWeights:
    """As at a start, by one way."""
    drop_from_page_cache(session)
    stored = HfTensors(session.model_dir)
    parts = TrainerParts(trainer=session.trainer, shards=session.shards, stored=stored)
    engine: Any = session.sampler.engine
    loaded = load_first_weights(parts, session.sync, engine if by_engine else None)
    assert loaded.by_engine == by_engine, "the log says why vLLM cannot read the weights"
    return loaded


def measure(args: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """A line for each way; called by every rank."""
    overrides = [
        f"model.path={directory / 'model'}",
        f"run.dir={directory / 'run'}",
        f"model.dtype={args.dtype}",
        f"parallel.tp={args.tp}",
        f"parallel.pp={args.pp}",
        f"rollout.tp={args.rollout_tp}",
        f"sync.bucket_mb={args.bucket_mb}",
        "rollout.engine=vllm",
        "rollout.batch_size=4",
    ]
    found: dict[bool, list[FirstWeights]] = {False: [], True: []}
    extra = 0
    with open_session(load_config(CONFIG, overrides)) as session:
        return_freed_memory()
        for _ in range(args.repeats):
            for by_engine, loads in found.items():
                loads.append(fill(session, by_engine=by_engine))
            extra = max(extra, measured(session.device, session.sync.pull)[1])
        about = {
            "device": session.device.torch_device.type,
            "world_size": session.layout.world_size,
            "tp": args.tp,
            "pp": args.pp,
            "rollout_tp": args.rollout_tp,
            "model_bytes": session.shards.model_bytes,
        }
    lines = []
    for by_engine, loads in found.items():
        line = about | {"way": "engine" if by_engine else "disk"}
        for name in ("file_bytes", "disk_bytes"):
            line[name] = int(statistics.median(getattr(load, name) for load in loads))
        for name in ("seconds", "pull_seconds"):
            line[name] = round(statistics.median(getattr(load, name) for load in loads), 3)
        if by_engine:
            line["pull_extra_mib"] = round(extra / 2**20, 1)
            line["two_buckets_mib"] = 2 * args.bucket_mb
        lines.append(line)
    return lines if session.layout.is_main else []


def keep_weights_plain() -> None:
    """vLLM's linear layers on a CPU without oneDNN."""
    if not torch.accelerator.is_available():
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--rollout-tp", type=int, default=1)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--written", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.written is not None:
        start_ranks(args.ranks)
        keep_weights_plain()
        for line in measure(args, args.written):
            print(json.dumps(line))
        return
    with tempfile.TemporaryDirectory() as name:
        write_model(args, Path(name) / "model")
        ended = subprocess.run([sys.executable, *sys.argv, "--written", name])
    sys.exit(ended.returncode)


if __name__ == "__main__":
    run_main(main)
