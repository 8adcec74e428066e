"""Seconds and peak memory of `Trainer.step`, one JSON line per acceptance rate.

    python benchmarks/train_step.py [--shape NAME --tokens N --impl METHOD]
    torchrun --nproc-per-node 8 benchmarks/train_step.py --tp 4 --pp 2 ...    (or tp x pp ranks)

A Qwen2 of random weights takes the step that on-policy SFT takes on the accepted ones of
`--samples` sampled responses; only they are packed, so the step should cost in proportion to them.
The rates are timed in turn on the same trainer; medians of the slowest rank.

tokens: of all sequences trained on, prompts included. peak_bytes: the most memory of a rank above
its weights, gradients and optimizer state, exact on CUDA, of the process on a CPU.
"""

import argparse
import random
from functools import partial

from ranks import (
    end_with,
    join_ranks,
    measured_in_turn,
    pack_accepted,
    peak_flops,
    random_trainer,
    rank_parser,
    run_main,
    start_ranks,
)
from shapes import SHAPES

from megatron_opsft.config import ParallelConfig, TrainConfig
from megatron_opsft.models.architectures.shape import ModelShape, forward_flops, quadratic_at
from megatron_opsft.models.weights.rules import padded_vocab_size
from megatron_opsft.records import Sample
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.distributed import Layout
from megatron_opsft.trainer.loss.cross_entropy import te_problem
from megatron_opsft.trainer.loss.loss_memory import choose_cross_entropy
from megatron_opsft.trainer.model.step import Trainer


def build_trainer(
    args: argparse.Namespace,
    parallel: ParallelConfig,
    shape: ModelShape,
    device: Device,
    layout: Layout,
) -> tuple[Trainer, str]:
    """With random weights; and the cross-entropy that was chosen."""
    train = TrainConfig(max_tokens_per_microbatch=args.tokens, recompute=args.recompute)
    loss = choose_cross_entropy(
        args.impl,
        te_problem(device, args.dtype),
        max_tokens=args.tokens,
        rows_per_rank=padded_vocab_size(shape.vocab_size, args.tp) // args.tp,
    )
    trainer = random_trainer(shape, args.dtype, parallel, train, device, layout, loss.kind)
    return trainer, loss.kind


def draw_samples(args: argparse.Namespace, vocab_size: int) -> list[Sample]:
    """Log-normal response lengths around `--response`, at most four times that; shortest first."""
    draw = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab_size) for _ in range(count))

    drawn = [
        Sample(
            problem_id=str(n),
            sample_index=0,
            prompt_ids=tokens(args.prompt),
            response_ids=tokens(
                max(1, min(4 * args.response, int(args.response * draw.lognormvariate(0, 0.5))))
            ),
        )
        for n in range(args.samples)
    ]
    return sorted(drawn, key=lambda sample: len(sample.response_ids))


def accept(args: argparse.Namespace, rate: float) -> list[bool]:
    """Evenly over the lengths, so that the rate is that of tokens too."""
    count = max(1, round(rate * args.samples))
    accepted = {int((n + 0.5) * args.samples / count) for n in range(count)}
    return [n in accepted for n in range(args.samples)]


def measure(args: argparse.Namespace) -> None:
    """Called by every rank."""
    parallel = ParallelConfig(tp=args.tp, pp=args.pp, sequence_parallel=args.tp > 1)
    device, layout = join_ranks(args.device, parallel)
    shape = SHAPES[args.shape]
    trainer, method = build_trainer(args, parallel, shape, device, layout)
    samples = draw_samples(args, shape.vocab_size)
    accepted = {rate: accept(args, rate) for rate in args.acceptance}

    def step(rate: float) -> None:
        batches, factor = pack_accepted(
            samples,
            accepted[rate],
            parallel,
            budget=args.tokens,
            dp_rank=layout.dp_rank,
            dp_size=layout.dp_size,
            quadratic_at=quadratic_at(shape),
            device=device.torch_device,
        )
        trainer.step(batches, factor, lr=1e-7)

    # The first step makes the optimizer's state.
    acts = {rate: partial(step, rate) for rate in accepted}
    found = measured_in_turn(device, acts, args.repeats, uncounted=1)
    lines = []
    for rate, (median, peak_bytes) in found.items():
        chosen = [sample for sample, flag in zip(samples, accepted[rate], strict=True) if flag]
        lengths = [len(s.prompt_ids) + len(s.response_ids) for s in chosen]
        line = {
            "benchmark": "train_step",
            "device": device.torch_device.type,
            "dtype": args.dtype,
            "impl": method,
            "world_size": layout.world_size,
            "tp": args.tp,
            "pp": args.pp,
            "shape": args.shape,
            "recompute": args.recompute,
            "acceptance": rate,
            "samples": len(chosen),
            "tokens": sum(lengths),
            "seconds": round(median, 4),
            "tokens_per_second": round(sum(lengths) / median, 1),
            "peak_bytes": peak_bytes,
        }
        if peak_rate := peak_flops(device):
            responses = sum(len(s.response_ids) for s in chosen)
            flops = 3 * forward_flops(shape, lengths, responses)
            line["mfu"] = round(flops / median / peak_rate / layout.world_size, 4)
        if 1.0 in found:
            line["seconds_to_all_accepted"] = round(median / found[1.0][0], 3)
        lines.append(line)
    end_with(layout, lines)


def main() -> None:
    parser = rank_parser(__doc__, dtype="float32", repeats=3)
    methods = ("auto", "fused_linear", "te")
    parser.add_argument("--impl", choices=methods, default="auto", help="train.cross_entropy")
    parser.add_argument("--tokens", type=int, default=4096, help="budget of a micro-batch")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--samples", type=int, default=32, help="sampled responses")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=256, help="median tokens of a response")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[1.0, 0.25])
    args = parser.parse_args()
    start_ranks(args.tp * args.pp)
    measure(args)


if __name__ == "__main__":
    run_main(main)
