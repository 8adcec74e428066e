"""Seconds and peak memory of the token losses with all their gradients, one JSON line per method.

    python benchmarks/cross_entropy.py --impl fused_linear eager [--tokens N --vocab N --hidden N]
    python benchmarks/cross_entropy.py --impl fused_linear --tp 4 ...

Hidden states [tokens, hidden] and an output weight [vocab, hidden] (this rank's rows of it) come
in; the weighted sum of the losses and the gradients of both go out. `eager` is what is usually
written: whole logits, `F.cross_entropy` on them in float32. The others are `train.cross_entropy`'s.
Repeats go in turn, so that the machine's drift hits all alike; medians of the slowest rank.

peak_bytes: the most memory above what was there before (hidden states, weight and its float32
gradient buffer): exact on CUDA, of the process on a CPU. formula_bytes: what `loss_memory` says.
"""

import argparse
import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from ranks import (
    end_with,
    join_ranks,
    measured_in_turn,
    peak_flops,
    rank_parser,
    run_main,
    start_ranks,
)
from torch import Tensor

from megatron_opsft.config import ParallelConfig
from megatron_opsft.models.weights.rules import padded_vocab_size
from megatron_opsft.runtime.device import Device
from megatron_opsft.trainer.loss.cross_entropy import summed_loss, te_problem
from megatron_opsft.trainer.loss.fused_linear import fused_linear_loss
from megatron_opsft.trainer.loss.loss_memory import choose_cross_entropy, fused_linear_bytes
from megatron_opsft.trainer.loss.output_head import OutputHead, whole_hidden
from megatron_opsft.trainer.loss.token_losses import WeightedLikelihood

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Run = Callable[[], None]


def eager_loss(hidden_TH: Tensor, head: OutputHead, labels_T: Tensor, weights_T: Tensor) -> Tensor:
    """On one rank."""
    logits_TV = (hidden_TH @ head.weight_VH[: head.num_rows].T).float()
    return (F.cross_entropy(logits_TV, labels_T, reduction="none") * weights_T).sum()


def prepare(args: argparse.Namespace, device: Device, impl: Any) -> Run:
    """Everything that is there before, and a function that computes loss and gradients."""
    draw = torch.Generator(device.torch_device).manual_seed(0)
    where: dict[str, Any] = {"device": device.torch_device, "dtype": DTYPES[args.dtype]}
    group = parallel_state.get_tensor_model_parallel_group()
    rows = padded_vocab_size(args.vocab, args.tp) // args.tp
    if impl != "eager":
        method = choose_cross_entropy(
            impl, te_problem(device, args.dtype), max_tokens=args.tokens, rows_per_rank=rows
        ).kind
    weight: Any = torch.nn.Parameter(torch.empty(rows, args.hidden, **where))
    with torch.no_grad():
        weight.normal_(0, 0.02, generator=draw)
    weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    head = OutputHead(weight_VH=weight, vocab_size=args.vocab, group=group)
    hidden = torch.empty(args.tokens, args.hidden, **where).normal_(generator=draw)
    labels = torch.randint(args.vocab, (args.tokens,), device=where["device"], generator=draw)
    positions = torch.arange(args.tokens, device=where["device"])
    weights = torch.ones(args.tokens, device=where["device"])
    losses = WeightedLikelihood(weights)

    def run() -> None:
        leaf = hidden.detach().requires_grad_()
        whole = whole_hidden(leaf, group, sequence_parallel=False)
        if impl == "eager":
            loss = eager_loss(whole, head, labels, weights)
        elif method == "fused_linear":
            loss, _ = fused_linear_loss(
                whole, head, positions, labels, losses, chunk_tokens=args.chunk_tokens
            )
        else:
            loss, _ = summed_loss(method, whole, head, positions, labels, losses)
        loss.backward()
        weight.grad = None

    return run


def measure(args: argparse.Namespace) -> None:
    """Called by every rank."""
    device, layout = join_ranks(args.device, ParallelConfig(tp=args.tp))
    if not device.is_cuda:
        # Resident bytes are live ones: glibc keeps up to 32 MiB of each size that is freed.
        ctypes.CDLL(None).mallopt(-3, 2**20)
    # CUDA compiles and tunes at first.
    runs = {impl: prepare(args, device, impl) for impl in args.impl}
    found = measured_in_turn(device, runs, args.repeats, uncounted=int(device.is_cuda))
    rows = padded_vocab_size(args.vocab, args.tp) // args.tp
    formula = fused_linear_bytes(
        args.tokens,
        args.hidden,
        rows,
        dtype_bytes=DTYPES[args.dtype].itemsize,
        on_cuda=device.is_cuda,
        chunk_tokens=args.chunk_tokens,
    )
    lines = []
    for impl, (median, peak_bytes) in found.items():
        line = {
            "benchmark": "cross_entropy",
            "impl": impl,
            "device": device.torch_device.type,
            "dtype": args.dtype,
            "tokens": args.tokens,
            "vocab": args.vocab,
            "hidden": args.hidden,
            "tp": args.tp,
            "seconds": round(median, 4),
            "tokens_per_second": round(args.tokens / median, 1),
            "peak_bytes": peak_bytes,
        }
        if impl == "fused_linear":
            line["formula_bytes"] = formula
        if peak := peak_flops(device):
            flops = 6 * args.tokens * args.hidden * args.vocab / args.tp
            line["mfu"] = round(flops / median / peak, 4)
        if "eager" in args.impl:
            line["seconds_to_eager"] = round(median / found["eager"][0], 3)
            line["peak_to_eager"] = round(peak_bytes / max(found["eager"][1], 1), 3)
        lines.append(line)
    end_with(layout, lines)


def main() -> None:
    parser = rank_parser(__doc__, dtype="float32", repeats=3)
    methods = ("auto", "fused_linear", "te", "eager")
    parser.add_argument("--impl", nargs="+", choices=methods, default=["fused_linear", "eager"])
    parser.add_argument("--tokens", type=int, default=1024, help="response tokens")
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--chunk-tokens", type=int, help="of fused_linear, as its default")
    args = parser.parse_args()
    if "eager" in args.impl and args.tp > 1:
        parser.error("--impl eager is for one rank; use --tp 1 or leave it out")
    start_ranks(args.tp)
    measure(args)


if __name__ == "__main__":
    run_main(main)
