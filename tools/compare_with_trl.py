"""GRPO's gradient norms over three updates against TRL's GRPOTrainer, on the same rollouts.

Needs no rollout engine: prompts, responses and rewards are drawn once, and both sides train the
tiny reasoner on them in float32, with beta 0 and 0.04. Prints a JSON line for each beta; exit code
1 where norms differ by more than 1e-4 of their size. TRL is installed into a directory of its own:

    pip install --target DIR --no-deps trl accelerate
    PYTHONPATH=DIR python tools/compare_with_trl.py
"""

import argparse
import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from megatron_opsft.batching.microbatch import build_microbatch
from megatron_opsft.config_file import load_config
from megatron_opsft.methods.advantages import group_normalized
from megatron_opsft.methods.aggregation import aggregate
from megatron_opsft.methods.objective import Objective
from megatron_opsft.model.load import build_trainer
from megatron_opsft.model.reference import ReferenceModel
from megatron_opsft.records import MicroBatch, Sample
from megatron_opsft.runtime import cpu_compat
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.distributed import start_distributed, stop_distributed

PROJECT = Path(__file__).parents[1]
MODEL = PROJECT / "megatron_opsft/assets/tiny_reasoner"
CONFIG = PROJECT / "examples/configs/quickstart.yaml"
UPDATES, PROBLEMS, GROUP, LONGEST = 3, 4, 4, 24
LR, LIMIT = 2e-4, 1e-4
EPSILON = 1e-4  # what TRL adds to a standard deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Responses to one prompt, all different, and their rewards."""

    prompt_ids: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]


def draw(vocab_size: int) -> list[list[Group]]:
    """The groups of each update, from a fixed seed."""
    dice = random.Random(0)

    def tokens(shortest: int) -> tuple[int, ...]:
        return tuple(dice.randrange(vocab_size) for _ in range(dice.randint(shortest, LONGEST)))

    def group() -> Group:
        return Group(
            prompt_ids=tokens(3),
            responses=tuple(tokens(5) for _ in range(GROUP)),
            rewards=tuple(dice.random() for _ in range(GROUP)),
        )

    return [[group() for _ in range(PROBLEMS)] for _ in range(UPDATES)]


def micro_batch(groups: list[Group], objective: Objective) -> tuple[MicroBatch, float]:
    """Of one update: GRPO's advantages, each response's mean over its tokens."""
    samples = [
        Sample(problem_id="", sample_index=0, prompt_ids=group.prompt_ids, response_ids=ids)
        for group in groups
        for ids in group.responses
    ]
    advantages = [a for group in groups for a in group_normalized(group.rewards, EPSILON)]
    lengths = [len(sample.response_ids) for sample in samples]
    weights, factor = aggregate("sequence", lengths, [True] * len(lengths), LONGEST)
    if objective.is_weighted_likelihood:
        weights = tuple(w * a for w, a in zip(weights, advantages, strict=True))
    cpu = torch.device("cpu")
    batch = build_microbatch(samples, weights, advantages=advantages, align=1, device=cpu)
    return batch, factor


def our_norms(updates: list[list[Group]], beta: float) -> list[float]:
    """Gradient norms of our trainer's steps."""
    config = load_config(
        CONFIG,
        [
            f"model.path={MODEL}",
            "rollout.temperature=1",
            "model.dtype=float32",
            f"optimizer.lr={LR}",
            "optimizer.weight_decay=0",
            "optimizer.clip_grad=1",
            "optimizer.beta2=0.999",
            "optimizer.eps=1e-5",
            "method.name=grpo",
            f"method.beta={beta}",
        ],
    )
    device = select_device("cpu")
    layout = start_distributed(device, config.parallel)
    parts = build_trainer(config, MODEL, device, layout)
    parts.fill_from_disk()
    trainer = parts.trainer
    reference = ReferenceModel(trainer, device) if beta else None
    norms = []
    for groups in updates:
        batch, factor = micro_batch(groups, trainer.objective)
        batches = [batch] if reference is None else reference.with_log_probs([batch])
        norms.append(trainer.step(batches, factor, LR).grad_norm)
    stop_distributed()
    return norms


def trl_norms(updates: list[list[Group]], beta: float, directory: str) -> list[float]:
    """Gradient norms that TRL's trainer logs."""
    from trl import GRPOConfig, GRPOTrainer

    groups = [group for batch in updates for group in batch]
    rewards = {
        response: reward
        for group in groups
        for response, reward in zip(group.responses, group.rewards, strict=True)
    }

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """A prompt is the number of its group, once for each response."""
        seen: dict[str, int] = {}
        found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
        for prompt in prompts:
            place = seen.setdefault(prompt, 0)
            seen[prompt] += 1
            group = groups[int(prompt)]
            found["prompt_ids"].append(list(group.prompt_ids))
            found["completion_ids"].append(list(group.responses[place]))
        return found

    def reward(completion_ids: list[list[int]], **unused: Any) -> list[float]:
        return [rewards[tuple(ids)] for ids in completion_ids]

    trainer = GRPOTrainer(
        model=str(MODEL),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=PROBLEMS * GROUP,
            num_generations=GROUP,
            max_completion_length=LONGEST,
            max_steps=UPDATES,
            beta=beta,
            epsilon=0.2,
            loss_type="grpo",
            use_bias_correction_kl=False,  # else the divergence has the ratio as a factor
            temperature=1.0,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            adam_beta2=0.999,
            adam_epsilon=1e-5,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        ),
        train_dataset=Dataset.from_dict({"prompt": [str(n) for n in range(len(groups))]}),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        rollout_func=roll_out,
    )
    trainer.train()
    return [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cpu_compat.install()
    vocab_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    updates = draw(vocab_size)
    worst = 0.0
    for beta in (0.0, 0.04):
        ours = our_norms(updates, beta)
        with tempfile.TemporaryDirectory() as directory:
            theirs = trl_norms(updates, beta, directory)
        difference = max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
        worst = max(worst, difference)
        print(json.dumps({"beta": beta, "ours": ours, "trl": theirs, "largest": difference}))
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
