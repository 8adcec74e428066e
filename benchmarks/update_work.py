"""The rollouts that every contender of `against_peers.py update` trains on: lengths of real answers
and random token ids, the same in every process.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_opsft.config import OptimizerConfig, RolloutConfig
from megatron_opsft.records import Sample
from megatron_opsft.runtime.device import Device

PAD_ID, END_ID = 0, 1

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

Run = Callable[[], list[float]]  # runs the steps and returns the seconds of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every contender trains on, and how."""

    model_dir: Path
    device: Device
    dtype: str
    optimizer: OptimizerConfig
    samples: Sequence[Sample]
    """Group behind group."""
    accepted: Sequence[bool]
    """Of each sample, whether it was accepted."""
    group_size: int
    rows: int
    """Samples in a padded micro-batch."""
    num_steps: int
    """The first of them warms up."""

    @property
    def response_width(self) -> int:
        """Tokens of the longest response."""
        return max(len(sample.response_ids) for sample in self.samples)

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a padded micro-batch, and so the budget of a packed one."""
        prompt_width = max(len(sample.prompt_ids) for sample in self.samples)
        return self.rows * (prompt_width + self.response_width)

    def advantages(self) -> Tensor:
        """(reward - mean of its group) / (deviation of its group + 1e-4), float32 [samples]."""
        rewards = torch.tensor(self.accepted, dtype=torch.float32).view(-1, self.group_size)
        centred = rewards - rewards.mean(1, keepdim=True)
        return (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()

    def num_padded_tokens(self) -> int:
        """Tokens of all samples, each micro-batch as wide as its own longest one."""
        total = 0
        for start in range(0, len(self.samples), self.rows):
            part = self.samples[start : start + self.rows]
            prompt_width = max(len(sample.prompt_ids) for sample in part)
            response_width = max(len(sample.response_ids) for sample in part)
            total += self.rows * (prompt_width + response_width)
        return total

    def num_tokens(self, *, accepted_only: bool) -> int:
        """Tokens of the samples, prompts included."""
        return sum(
            len(sample.prompt_ids) + len(sample.response_ids)
            for sample, accepted in zip(self.samples, self.accepted, strict=True)
            if accepted or not accepted_only
        )


class StepClock:
    """Seconds of each step."""

    def __init__(self, work: Work) -> None:
        self._device = work.device
        self.seconds: list[float] = []

    def begin(self) -> None:
        """Call it before each step."""
        self._device.synchronize()
        self._started = perf_counter()

    def end(self) -> None:
        """Call it after each step, its update included."""
        self._device.synchronize()
        self.seconds.append(perf_counter() - self._started)


def time_steps(step: Callable[[], object], work: Work) -> list[float]:
    """Seconds of each of the steps."""
    clock = StepClock(work)
    for _ in range(work.num_steps):
        clock.begin()
        step()
        clock.end()
    return clock.seconds


def make_model(shape: str, positions: int, directory: Path) -> int:
    """Write a Qwen2 with random weights; returns the number of its parameters."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **dict(zip(SHAPE_FIELDS, SHAPES[shape], strict=True)),
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=END_ID,
    )
    model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def draw_samples(args: argparse.Namespace) -> tuple[list[Sample], list[bool]]:
    """Samples of random tokens, and which of them are accepted: some of the finished ones.

    Lengths are real ones, cut off at a run's default rollout length and scaled down.
    args: the options of `against_peers.py update`.
    """
    draw = random.Random(args.seed)
    vocab_size = SHAPES[args.shape][SHAPE_FIELDS.index("vocab_size")]
    limit, longest_prompt = RolloutConfig().max_response_tokens, max(REAL_LENGTHS)[0]

    def some_ids(share: float, longest: int) -> tuple[int, ...]:
        return tuple(draw.randrange(2, vocab_size) for _ in range(max(2, round(share * longest))))

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
    kept = draw.sample(finished, min(round(args.acceptance * len(samples)), len(finished)))
    return samples, [number in kept for number in range(len(samples))]
