"""Seconds of a training step, ours against a plain PyTorch/transformers loop with the same work.

Both train the same model on the same problems in one process, step by step in turn, so that the
machine's drift hits both. The plain loop is what one would write without this project: `generate`
on the whole batch, math-verify, a padded batch through the Hugging Face model, AdamW. Prints one
JSON line: medians, their ratio, and where our time goes.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megatron_opsft.config_file import load_config
from megatron_opsft.records import Outcome, Problem
from megatron_opsft.runtime.stopwatch import Stopwatch
from megatron_opsft.session import Session, open_session
from megatron_opsft.step.batch import pack_updates, sample_batch
from megatron_opsft.verify.math_verifier import judge

CONFIG = Path(__file__).parents[1] / "examples/configs/quickstart.yaml"


def our_step(s: Session, step: int) -> tuple[Stopwatch, int]:
    """The verbs of `train.run_step`; returns its times and the number of sampled tokens."""
    watch = Stopwatch(s.device)
    batch = sample_batch(s, step, watch)
    updates = pack_updates(s, batch, watch)
    with watch.phase("train"):
        for update in updates:
            s.trainer.step(update.microbatches, update.factor, s.config.optimizer.lr)
    s.method.advance(batch.groups, batch.refills)
    with watch.phase("sync"):
        s.sync.push(step)
    return watch, sum(response.num_tokens for response in batch.responses)


class PlainLoop:
    """One rank, one model for sampling and training, nothing sharded and nothing packed."""

    def __init__(self, s: Session) -> None:
        self.s = s
        self.tokenizer = s.sampler.encoder.tokenizer
        self.model = AutoModelForCausalLM.from_pretrained(s.model_dir, dtype=torch.float32)
        optimizer = s.config.optimizer
        self.adamw = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=0.0,
        )
        self.pad = s.settings.end_token_ids[0]

    def step(self, problems: list[Problem]) -> int:
        """One on-policy SFT step; returns the number of sampled tokens."""
        group = self.s.config.rollout.group_size
        rows = [(p, self.s.sampler.encoder.encode(p)) for p in problems for _ in range(group)]
        width = max(len(prompt) for _, prompt in rows)
        ids = torch.tensor([[self.pad] * (width - len(p)) + list(p) for _, p in rows])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for _, p in rows])
        settings = self.s.settings
        with torch.no_grad():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=0,
                max_new_tokens=settings.max_response_tokens,
                eos_token_id=list(settings.end_token_ids),
                pad_token_id=self.pad,
            )
        accepted, num_tokens = [], 0
        for (problem, prompt), row in zip(rows, out[:, width:].tolist(), strict=True):
            end = next((i for i, t in enumerate(row) if t in settings.end_token_ids), None)
            num_tokens += len(row) if end is None else end + 1
            if end is None:
                continue
            text = self.tokenizer.decode(row[:end], skip_special_tokens=False)
            if judge(text, problem.answer).outcome is Outcome.CORRECT:
                accepted.append((list(prompt), row[: end + 1]))
        if accepted:
            self.update(accepted, len(rows))
        return num_tokens

    def update(self, accepted: list[tuple[list[int], list[int]]], num_rollouts: int) -> None:
        """The paper's loss on right-padded micro-batches of 64 sequences."""
        longest = max(len(response) for _, response in accepted)
        accepted.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        self.model.train()
        self.adamw.zero_grad()
        for first in range(0, len(accepted), 64):
            part = accepted[first : first + 64]
            width = max(len(p) + len(r) for p, r in part)
            ids = torch.full((len(part), width), self.pad)
            mask = torch.zeros(len(part), width)
            labels = torch.full((len(part), width), -100)
            for row, (prompt, response) in enumerate(part):
                stop = len(prompt) + len(response)
                ids[row, :stop] = torch.tensor(prompt + response)
                mask[row, :stop] = 1
                labels[row, len(prompt) : stop] = torch.tensor(response)
            logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
            )
            (loss / (num_rollouts * longest)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each loop")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    args = parser.parse_args()
    config = load_config(CONFIG, args.overrides)
    ours, plain, phases = [], [], []
    tokens = {"ours": 0, "plain": 0}
    with open_session(config) as s:
        s.sync.push(0)
        loop = PlainLoop(s)
        for step in range(1, args.warmup + args.steps + 1):
            problems = s.problems_of(step)
            watch, ours_tokens = our_step(s, step)
            our_seconds = watch.total()
            start = time.perf_counter()
            plain_tokens = loop.step(problems)
            plain_seconds = time.perf_counter() - start
            if step > args.warmup:
                ours.append(our_seconds)
                plain.append(plain_seconds)
                phases.append(watch.seconds)
                tokens["ours"] += ours_tokens
                tokens["plain"] += plain_tokens
    result = {
        "benchmark": "step",
        "seconds": round(statistics.median(ours), 4),
        "plain_seconds": round(statistics.median(plain), 4),
        "ratio": round(statistics.median(a / b for a, b in zip(ours, plain, strict=True)), 3),
        "steps": args.steps,
        "tokens": tokens["ours"],
        "plain_tokens": tokens["plain"],
        **{
            f"{name}_seconds": round(statistics.median(p[name] for p in phases), 4)
            for name in phases[0]
        },
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
