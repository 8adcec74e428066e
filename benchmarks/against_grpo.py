"""Seconds and peak memory of the train phase: on-policy SFT against GRPO on the same rollouts.

    python benchmarks/against_grpo.py [--shape small] [--prompts 3] [--group 8] [--rounds 2] ...

Contenders, each in a process of its own, in turn: ours (accepted samples, packed, `Trainer.step`),
and GRPO in plain PyTorch and transformers, with beta 0 and above. Not timed: sampling and
verification; all get the same token ids and verdicts. Lengths are real ones, cut off at a run's
default rollout length (cut answers are never accepted) and scaled down. Equal for all: weights,
dtype (bfloat16: GRPO's weights are float32 under autocast, as our optimizer keeps main weights),
AdamW, clipping, threads, no recomputation, and the tokens of a micro-batch: ours packs as many as
`--rows` padded samples have.

Prints a JSON line for each contender and round as soon as it is measured, and one of all at the
end. `seconds`: median of the steps after the first. `peak_bytes`: highest while training, over what
was resident before the model was built. `activation_bytes`: that less weights, gradients, moments
and reference model. `tokens`, prompts included: of all and of accepted samples;
`padded`: of all, each micro-batch as wide as its own longest sample;
of `microbatch` at most, and in ours' fullest, `packed_microbatch`.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from grpo_reference import END_ID, PlainGrpo, Run, Work, time_steps
from ranks import forget_peak, join_ranks, pack_accepted
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_opsft.config import Config, OptimizerConfig, RolloutConfig
from megatron_opsft.model.load import build_trainer
from megatron_opsft.records import MicroBatch, Sample
from megatron_opsft.runtime.device import peak_memory_bytes, select_device

SHAPE_FIELDS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)
SHAPES = {
    "tiny": (2, 64, 160, 4, 2, 512, True),
    "small": (8, 256, 768, 4, 2, 151936, True),
    "small_512": (8, 512, 1536, 8, 2, 151936, True),
    "narrow_vocabulary": (8, 512, 1536, 8, 2, 32768, True),
    "r1_distill_qwen_1.5b": (28, 1536, 8960, 12, 2, 151936, False),
}
# (prompt, response) tokens of R1-Distill-Qwen-7B on 20 problems of MATH-500.
REAL_LENGTHS = (
    *((52, 1255), (115, 2423), (52, 2015), (19, 2109), (344, 3739), (46, 1029), (24, 2350)),
    *((71, 2769), (39, 1066), (154, 32768), (30, 4446), (64, 4389), (76, 2663), (180, 421)),
    *((118, 2176), (183, 3924), (28, 2693), (216, 11038), (155, 10380), (52, 2040)),
)
CONTENDERS = ("ours", "grpo_beta0", "grpo_beta")


def make_model(args: argparse.Namespace, directory: Path) -> int:
    """A directory with random weights; the number of parameters."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **dict(zip(SHAPE_FIELDS, SHAPES[args.shape], strict=True)),
        max_position_embeddings=args.prompt_tokens + args.max_tokens,
        bos_token_id=None,
        eos_token_id=END_ID,
    )
    model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def plan_work(args: argparse.Namespace, model_dir: Path) -> Work:
    """The same in every process: samples of random tokens, some of the finished ones accepted."""
    draw = random.Random(args.seed)
    device = select_device(args.device)
    limit, longest_prompt = RolloutConfig().max_response_tokens, max(REAL_LENGTHS)[0]

    def some_ids(share: float, longest: int) -> tuple[int, ...]:
        vocab = SHAPES[args.shape][SHAPE_FIELDS.index("vocab_size")]
        return tuple(draw.randrange(2, vocab) for _ in range(max(2, round(share * longest))))

    samples, finished = [], []
    for number in range(args.prompts * args.group):
        problem, index = divmod(number, args.group)
        if index == 0:
            prompt = some_ids(draw.choice(REAL_LENGTHS)[0] / longest_prompt, args.prompt_tokens)
        length = draw.choice(REAL_LENGTHS)[1]
        response = some_ids(min(length, limit) / limit, args.max_tokens)
        if length <= limit:
            finished.append(number)
            response = (*response[:-1], END_ID)
        ids = {"prompt_ids": prompt, "response_ids": response}
        samples.append(Sample(problem_id=str(problem), sample_index=index, **ids))
    accepted = draw.sample(finished, min(round(args.acceptance * len(samples)), len(finished)))
    return Work(
        model_dir=model_dir,
        device=device,
        dtype=args.dtype or ("bfloat16" if device.is_cuda else "float32"),
        optimizer=OptimizerConfig(),
        samples=samples,
        accepted=[number in accepted for number in range(len(samples))],
        group_size=args.group,
        rows=args.rows,
        num_steps=1 + args.repeats,
    )


def our_batches(work: Work) -> tuple[list[MicroBatch], float]:
    """Packed as by a step of one rank, with the factor of the loss; needs no process group."""
    return pack_accepted(
        work.samples,
        work.accepted,
        budget=work.microbatch_tokens,
        dp_rank=0,
        dp_size=1,
        device=work.device.torch_device,
    )


def build_ours(work: Work) -> Run:
    """The trainer of a run of one rank, with the defaults of a run's configuration."""
    model = {"path": str(work.model_dir), "dtype": work.dtype}
    config = Config.model_validate({"model": model, "data": {"train": "arithmetic"}})
    device, layout = join_ranks(work.device.torch_device.type, config.parallel)
    parts = build_trainer(config, work.model_dir, device, layout)
    parts.fill_from_disk()
    trainer = parts.trainer
    return lambda: time_steps(lambda: trainer.step(*our_batches(work), work.optimizer.lr), work)


def build(name: str, work: Work, beta: float) -> Run:
    if name == "ours":
        return build_ours(work)
    plain = PlainGrpo(work, 0.0 if name == "grpo_beta0" else beta)
    return lambda: time_steps(plain.step, work)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one contender, in this process."""
    torch.set_num_threads(args.threads)
    work = plan_work(args, args.model_dir)
    before = forget_peak(work.device)
    run = build(args.only, work, args.beta)
    forget_peak(work.device)  # that of building
    seconds = run()
    return {"seconds": seconds[1:], "peak_bytes": peak_memory_bytes(work.device) - before}


def measure_apart(name: str, args: argparse.Namespace, model_dir: Path) -> dict[str, Any]:
    """`measure` in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *sys.argv, "--only", name, "--model-dir", str(model_dir)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ended.returncode:
        raise RuntimeError(f"{name} ended with code {ended.returncode}:\n{ended.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    print(json.dumps({"contender": name, **found}), flush=True)
    return found


def num_tokens(work: Work) -> dict[str, int]:
    """See the top of this file."""
    lengths = [(len(sample.prompt_ids), len(sample.response_ids)) for sample in work.samples]
    parts = [lengths[start : start + work.rows] for start in range(0, len(lengths), work.rows)]
    widths = [max(p for p, _ in part) + max(r for _, r in part) for part in parts]
    return {
        "all": sum(map(sum, lengths)),
        "accepted": sum(sum(n) for n, kept in zip(lengths, work.accepted, strict=True) if kept),
        "padded": work.rows * sum(widths),
        "microbatch": work.microbatch_tokens,
        "packed_microbatch": max(batch.tokens_T.numel() for batch in our_batches(work)[0]),
    }


def summarize(name: str, rounds: list[dict[str, Any]], parameters: int, dtype: str) -> Any:
    """The medians of a contender's rounds."""
    # Float32 weights, gradients and moments; the model's own weights; the reference.
    state_bytes = 16 + 2 * (name == "ours" and dtype == "bfloat16") + 4 * name.endswith("beta")
    peak = int(statistics.median(one["peak_bytes"] for one in rounds))
    return {
        "seconds": round(statistics.median(s for one in rounds for s in one["seconds"]), 4),
        "peak_bytes": peak,
        "activation_bytes": peak - state_bytes * parameters,
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Every contender in turn, `--rounds` times."""
    with tempfile.TemporaryDirectory() as directory:
        model_dir = Path(directory) / "model"
        parameters = make_model(args, model_dir)
        work = plan_work(args, model_dir)
        tokens = num_tokens(work)
        turns = [(name, measure_apart(name, args, model_dir)) for name in CONTENDERS * args.rounds]
    found = {}
    for name in CONTENDERS:
        rounds = [figures for turn, figures in turns if turn == name]
        found[name] = summarize(name, rounds, parameters, work.dtype)
    return {
        "benchmark": "against_grpo",
        "device": str(work.device.torch_device),
        "dtype": work.dtype,
        "threads": args.threads,
        "shape": args.shape,
        "parameters": parameters,
        "samples": len(work.samples),
        "accepted": sum(work.accepted),
        "tokens": tokens,
        "beta": args.beta,
        **found,
        "ratios": {
            name: {key: round(found["ours"][key] / found[name][key], 3) for key in found[name]}
            for name in CONTENDERS[1:]
        },
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--group", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--acceptance", type=float, default=0.5, help="share of the responses")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest response")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="longest prompt")
    parser.add_argument("--rows", type=int, default=8, help="samples in a padded micro-batch")
    parser.add_argument("--beta", type=float, default=0.04, help="of *_beta")
    parser.add_argument("--repeats", type=int, default=1, help="timed steps in a round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=37, help="37: ours fills its micro-batch")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU")
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--model-dir", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prompts * args.group % args.rows or args.beta <= 0:
        parser.error("--rows must divide --prompts times --group, and --beta be above 0")
    return args


if __name__ == "__main__":
    args = parse()
    print(json.dumps(measure(args) if args.only else compare(args)))
