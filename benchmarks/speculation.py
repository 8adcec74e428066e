"""Decoding with drafts against decoding without, in the HF engine: seconds, and the same tokens.

    python benchmarks/speculation.py quickstart [--steps N] [section.key=value ...]
    python benchmarks/speculation.py shaped [--acceptance A ...] [--tokens N] [--rounds N]

quickstart: real training steps of a configuration. Before each, the rollout phase runs once with
rollout.speculation=suffix and once without, from the same weights; who goes first alternates. The
history is that of the steps before.

shaped: a random model of SmolLM-135M's shape, 8 responses of N tokens together, float32. What such
a model says does not repeat itself (its head is untied: with a tied one a random model says one
token again and again, and drafts look better than they are), so the history is made: its own
responses, each token of which is replaced with chance 1 - A. A history of later epochs is like that
where responses to a problem differ in single tokens; where they differ in whole sentences, fewer
drafts are right. It measures the gain at a given acceptance, and says nothing of what acceptance a
real model has. Its logits are scaled so that a token has about the entropy of a reasoning model's.

Prints JSON lines: the median of the ratios without / with, seconds of both, whether every token was
the same, and the counts of the drafts.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_opsft.config_file import load_config
from megatron_opsft.records import Rollout
from megatron_opsft.rollout.draft_counts import DraftCounts, sum_counts
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.hf.attention import GROUPED_SDPA
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.rollout.hf.speculation import Speculation
from megatron_opsft.rollout.requests import PromptRequest, make_request
from megatron_opsft.run.recorder import open_recorder
from megatron_opsft.session import open_session
from megatron_opsft.train import run_step

CONFIG = Path(__file__).parents[1] / "examples/configs/quickstart.yaml"
VOCAB_SIZE, SHARPNESS = 49152, 20.0
SMOLLM = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)


def quickstart(config_file: Path, overrides: Sequence[str], num_steps: int) -> dict[str, Any]:
    """The rollout phase of training steps."""
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    counts, same, num_responses = [], True, 0
    with tempfile.TemporaryDirectory() as directory:
        fixed = ["rollout.engine=hf", "rollout.speculation=suffix", f"run.dir={directory}"]
        config = load_config(config_file, [*overrides, *fixed])
        with open_session(config) as s, open_recorder(s, resume=False, overwrite=True) as recorder:
            engine = cast(HfEngine, s.sampler.engine)
            speculation = engine.decoding.speculation
            s.sync.push(0, s.probes(0))
            for step in range(1, num_steps + 1):
                sampled = {}
                for side in ("with", "without") if step % 2 else ("without", "with"):
                    engine.decoding.speculation = speculation if side == "with" else None
                    start = time.perf_counter()
                    sampled[side] = s.sampler.sample(
                        s.problems_of(step),
                        s.settings,
                        num_samples=config.rollout.group_size,
                        step=step,
                    )
                    seconds[side].append(time.perf_counter() - start)
                    counts.append(engine.take_draft_counts())
                same &= sampled["with"] == sampled["without"]
                num_responses += len(sampled["with"])
                engine.decoding.speculation = None  # the step itself must not teach the history
                run_step(s, recorder, step)
    return {"case": "quickstart", "responses": num_responses, **_summary(seconds, counts, same)}


def shaped(acceptance: float, num_tokens: int, rounds: int) -> dict[str, Any]:
    """A batch of 8 of a model that reads 538 MB of weights in every pass."""
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(
        SMOLLM, dtype=torch.float32, attn_implementation=GROUPED_SDPA
    )
    model.model.norm.weight.data.fill_(SHARPNESS)
    engine = HfEngine(model, _NoText(), 8, version=0, exact=True)
    chance = random.Random(0)
    prompts = [[chance.randrange(VOCAB_SIZE) for _ in range(100)] for _ in range(8)]
    requests = [make_request(str(n), prompts[n], 1, run_seed=0, step=1) for n in range(8)]
    settings = SamplingSettings(
        temperature=1.0, top_p=0.95, max_response_tokens=num_tokens, end_token_ids=(VOCAB_SIZE,)
    )
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    counts, same = [], True
    for _ in range(rounds):
        sampled = {"without": _timed(engine, requests, settings, seconds["without"])}
        engine.decoding.speculation = Speculation()
        for rollout in sampled["without"]:
            text = [
                token if chance.random() < acceptance else chance.randrange(VOCAB_SIZE)
                for token in rollout.response_ids
            ]
            history = engine.decoding.speculation.history
            history.add(rollout.problem_id, [*rollout.prompt_ids, *text])
        sampled["with"] = _timed(engine, requests, settings, seconds["with"])
        counts.append(engine.take_draft_counts())
        engine.decoding.speculation = None
        same &= sampled["with"] == sampled["without"]
    about = {"case": "shaped", "kept_share": acceptance, "tokens": num_tokens}
    return {**about, **_summary(seconds, counts, same)}


class _NoText:
    def batch_decode(self, sequences: list[list[int]], **_: bool) -> list[str]:
        return [""] * len(sequences)


def _timed(
    engine: HfEngine,
    requests: Sequence[PromptRequest],
    settings: SamplingSettings,
    seconds: list[float],
) -> list[Rollout]:
    start = time.perf_counter()
    rollouts = engine.generate(requests, settings)
    seconds.append(time.perf_counter() - start)
    return rollouts


def _summary(
    seconds: dict[str, list[float]], counts: Sequence[DraftCounts], same: bool
) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(seconds["without"], seconds["with"], strict=True)]
    figures = sum_counts(counts).figures()
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_of_sums": round(sum(seconds["without"]) / sum(seconds["with"]), 3),
        "seconds_with": round(sum(seconds["with"]), 2),
        "seconds_without": round(sum(seconds["without"]), 2),
        "same_tokens": same,
        **{key: round(value, 3) for key, value in figures.items()},
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("case", choices=["quickstart", "shaped"])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--acceptance", type=float, nargs="*", default=[0.6, 0.8, 0.95])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_intermixed_args()
    if args.case == "quickstart":
        print(json.dumps(quickstart(args.config, args.overrides, args.steps)))
        return
    for acceptance in args.acceptance:
        print(json.dumps(shaped(acceptance, args.tokens, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
