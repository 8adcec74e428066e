"""Seconds and peak memory beside what others would run, each contender in a process of its own.

    python benchmarks/against_peers.py step [--config FILE] [--rounds 5] [KEY=VALUE ...]
    python benchmarks/against_peers.py update [--shape small] [--rounds 2] ...

`step`: a whole step of a run (its own code: sampling, verdicts, update, weight sync, files) against
one in plain PyTorch and transformers on the same problems, step by step in turn. The learning rate
is next to nothing, so that both go on sampling answers of the same lengths.

`update`: the update alone, on the same rollouts: ours (accepted samples, packed, `Trainer.step`),
GRPO in plain PyTorch and transformers, and TRL's `GRPOTrainer`, each with beta 0 and above
(`pip install '.[peers]'`; without TRL, name the others with --contenders). Lengths are real ones,
cut off at a run's default rollout length (cut answers are never accepted) and scaled down. Equal
for all: weights, dtype (bfloat16: GRPO's weights are float32 under autocast, as our optimizer keeps
main weights), AdamW, clipping, threads, no recomputation, and the tokens of a micro-batch: ours
packs as many as `--rows` padded samples have.

Prints a JSON line for each contender and round as soon as it is measured, and one of all at the
end. `seconds`: median of the steps after the first. `ratios`: ours over the contender. Of `update`:
`peak_bytes`: highest while training, over what was resident before the model was built (on a CPU in
a process of its own, in which glibc gives back what is freed).
`activation_bytes`: that less weights, gradients, moments and reference model. `tokens`, prompts
included: of all and of accepted samples; `padded`: of all, each micro-batch as wide as its own
longest sample (TRL: as the longest of all); of `microbatch` at most, and in ours' fullest,
`packed_microbatch`. Of `step`: `*_seconds`: where the time goes; `sampled_tokens`: of a step.
"""

import argparse
import json
from pathlib import Path

import compare_steps
import compare_updates
import torch
from update_work import SHAPES


def _add_own_process(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """What a contender's own process is told."""
    parser.add_argument("--only", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--threads", type=int, default=torch.get_num_threads())
    shared.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")

    step = parts.add_parser("step", parents=[shared], help="a whole step")
    step.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the configuration")
    step.add_argument("--config", type=Path, default=Path("examples/configs/quickstart.yaml"))
    step.add_argument("--rounds", type=int, default=5)
    _add_own_process(step, compare_steps.CONTENDERS)

    update = parts.add_parser("update", parents=[shared], help="the update alone")
    update.add_argument("--shape", choices=SHAPES, default="small")
    update.add_argument("--prompts", type=int, default=3)
    update.add_argument("--group", type=int, default=8, help="responses to each prompt")
    update.add_argument("--acceptance", type=float, default=0.5, help="share of the responses")
    update.add_argument("--max-tokens", type=int, default=256, help="longest response")
    update.add_argument("--prompt-tokens", type=int, default=32, help="longest prompt")
    update.add_argument("--rows", type=int, default=8, help="samples in a padded micro-batch")
    update.add_argument("--beta", type=float, default=0.04, help="of *_beta")
    update.add_argument("--repeats", type=int, default=1, help="timed steps in a round")
    update.add_argument("--rounds", type=int, default=1)
    update.add_argument("--seed", type=int, default=37, help="37: ours fills its micro-batch")
    update.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU")
    names = compare_updates.CONTENDERS
    update.add_argument("--contenders", nargs="+", choices=names, default=names)
    _add_own_process(update, names)

    args = parser.parse_args()
    if args.part == "update":
        if args.prompts * args.group % args.rows or args.beta <= 0:
            update.error("--rows must divide --prompts times --group, and --beta be above 0")
        if "ours" not in args.contenders:
            update.error("--contenders: `ours` is what the others are compared with; name it too")
    return args


def main() -> None:
    args = parse()
    if args.part == "step":
        if args.only:
            compare_steps.serve_steps(args)
        else:
            print(json.dumps(compare_steps.compare_steps(args)))
    elif args.only:
        print(json.dumps(compare_updates.measure_update(args)))
    else:
        print(json.dumps(compare_updates.compare_updates(args)))


if __name__ == "__main__":
    main()
