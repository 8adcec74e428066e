"""`against_peers.py update`: one contender after the other, each in a process of its own that ends
before the next begins, so that memory holds one.
"""

import argparse
import gc
import importlib
import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peer_grpo import PlainGrpo
from peer_ours import build_our_update, our_batches
from ranks import forget_peak, own_process
from update_work import Run, Work, draw_samples, make_model, time_steps

from megatron_opsft.config import OptimizerConfig
from megatron_opsft.runtime.device import peak_memory_bytes, select_device

# glibc keeps up to 32 MiB of each size that is freed; so it gives back what is over 1 MiB.
_GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
CONTENDERS = ("ours", "grpo_beta0", "grpo_beta", "trl_beta0", "trl_beta")


def plan_work(args: argparse.Namespace, model_dir: Path) -> Work:
    """The same work in every process."""
    device = select_device(args.device)
    samples, accepted = draw_samples(args)
    return Work(
        model_dir=model_dir,
        device=device,
        dtype=args.dtype or ("bfloat16" if device.is_cuda else "float32"),
        optimizer=OptimizerConfig(),
        samples=samples,
        accepted=accepted,
        group_size=args.group,
        rows=args.rows,
        num_steps=1 + args.repeats,
    )


def build(name: str, work: Work, beta: float) -> Run:
    """The contender, ready to train. beta: of those that have one above 0."""
    if name == "ours":
        return build_our_update(work)
    if name.endswith("_beta0"):
        beta = 0.0
    if name.startswith("trl"):
        from peer_trl import build_trl  # only where it is installed

        return build_trl(work, beta)
    plain = PlainGrpo(work, beta)
    return lambda: time_steps(plain.step, work)


def measure_update(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one contender, in this process."""
    torch.set_num_threads(args.threads)
    work = plan_work(args, args.directory / "model")
    if args.only.startswith("trl"):
        importlib.import_module("peer_trl")  # code is no part of the memory that training takes
    before = forget_peak(work.device)
    run = build(args.only, work, args.beta)
    gc.collect()  # a mapped weight file may hang on a cycle
    forget_peak(work.device)  # that of building
    _, *seconds = run()
    return {"seconds": seconds, "peak_bytes": peak_memory_bytes(work.device) - before}


def _measure_apart(
    name: str, args: argparse.Namespace, directory: Path, *, on_cuda: bool
) -> dict[str, Any]:
    """`measure_update` in a process of its own; for memory on a CPU in another one, in which
    resident bytes are live ones.
    """
    found = _run_process(name, args, directory)
    if not on_cuda:
        found["peak_bytes"] = _run_process(name, args, directory, **_GIVING_BACK)["peak_bytes"]
    print(json.dumps({"contender": name, **found}), flush=True)
    return found


def _run_process(
    name: str, args: argparse.Namespace, directory: Path, **more: str
) -> dict[str, Any]:
    """The figures that the process prints. more: of its environment."""
    command, environment = own_process(name, directory, args.threads)
    ended = subprocess.run(command, capture_output=True, text=True, env=environment | more)
    if ended.returncode:
        raise RuntimeError(f"{name} ended with code {ended.returncode}:\n{ended.stderr[-4000:]}")
    figures: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def compare_updates(args: argparse.Namespace) -> dict[str, Any]:
    """Every contender in turn, `--rounds` times."""
    names = args.contenders
    rounds_of: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as directory:
        positions = args.prompt_tokens + args.max_tokens
        parameters = make_model(args.shape, positions, Path(directory) / "model")
        work = plan_work(args, Path(directory) / "model")
        for _ in range(args.rounds):
            for name in names:
                figures = _measure_apart(name, args, Path(directory), on_cuda=work.device.is_cuda)
                rounds_of[name].append(figures)
    found = {name: _summarize(name, rounds_of[name], parameters, work.dtype) for name in names}
    return {
        "benchmark": "against_peers update",
        "device": str(work.device.torch_device),
        "dtype": work.dtype,
        "threads": args.threads,
        "shape": args.shape,
        "parameters": parameters,
        "samples": len(work.samples),
        "accepted": sum(work.accepted),
        "tokens": {
            "all": work.num_tokens(accepted_only=False),
            "accepted": work.num_tokens(accepted_only=True),
            "padded": work.num_padded_tokens(),
            "microbatch": work.microbatch_tokens,
            "packed_microbatch": max(batch.tokens_T.numel() for batch in our_batches(work)[0]),
        },
        "beta": args.beta,
        **found,
        "ratios": {
            name: {key: round(found["ours"][key] / found[name][key], 3) for key in found[name]}
            for name in names
            if name != "ours"
        },
    }


def _summarize(
    name: str, rounds: Sequence[dict[str, Any]], parameters: int, dtype: str
) -> dict[str, Any]:
    """The medians of a contender's rounds."""
    # Float32 weights, gradients and moments; the model's own weights; the reference.
    state_bytes = 16 + 2 * (name == "ours" and dtype == "bfloat16") + 4 * name.endswith("_beta")
    peak = int(statistics.median(one["peak_bytes"] for one in rounds))
    return {
        "seconds": round(statistics.median(s for one in rounds for s in one["seconds"]), 4),
        "peak_bytes": peak,
        "activation_bytes": peak - state_bytes * parameters,
    }
