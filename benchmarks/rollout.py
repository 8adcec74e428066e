"""Tokens a second of a training run's rollout phase, against bare `vllm.LLM.generate`.

    python benchmarks/rollout.py [--config CONFIG] [--steps N] [section.key=value ...]

Runs real training steps of a configuration (by default the quickstart's) with rollout.engine=vllm.
Before each, the step's prompts are sampled twice from the same weights: by the rollout phase as the
loop calls it (encoding prompts, decoding text and making records included), and by `LLM.generate`
of the same vLLM with the same seeds and parameters; who goes first alternates. Prints one JSON
line: tokens a second of both, the median of the steps' ratios, and whether both gave as many
tokens.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.config_file import load_config
from megatron_opsft.records import Problem
from megatron_opsft.rollout.requests import make_requests
from megatron_opsft.run.recorder import open_recorder
from megatron_opsft.session import Session, open_session
from megatron_opsft.train import run_step

CONFIG = Path(__file__).parents[1] / "examples/configs/quickstart.yaml"


def bare(llm: Any, s: Session, problems: Sequence[Problem], step: int) -> tuple[int, float]:
    """Tokens and seconds of plain vLLM on a step's requests."""
    from vllm import SamplingParams

    settings = s.settings
    inputs: list[Any] = []
    params = []
    for problem in problems:
        ids = s.sampler.encoder.encode(problem)
        group = s.config.rollout.group_size
        for request in make_requests(problem.id, ids, group, s.config.run.seed, step):
            inputs.append({"prompt_token_ids": list(ids)})
            params.append(
                SamplingParams(
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    max_tokens=settings.max_response_tokens,
                    seed=request.seed,
                    stop_token_ids=list(settings.end_token_ids),
                    detokenize=False,
                )
            )
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs), seconds


def ours(s: Session, problems: Sequence[Problem], step: int) -> tuple[int, float]:
    """Tokens and seconds of the rollout phase of `train.run_step`."""
    start = time.perf_counter()
    rollouts = s.sampler.sample(
        problems, s.settings, num_samples=s.config.rollout.group_size, step=step
    )
    seconds = time.perf_counter() - start
    return sum(len(rollout.response_ids) for rollout in rollouts), seconds


def measure(config_file: Path, overrides: Sequence[str], num_steps: int) -> dict[str, Any]:
    """The numbers of the JSON line."""
    with tempfile.TemporaryDirectory() as directory:
        fixed = ["rollout.engine=vllm", f"run.dir={directory}"]
        config = load_config(config_file, [*overrides, *fixed])
        sides: dict[str, list[tuple[int, float]]] = {"ours": [], "bare": []}
        with open_session(config) as s, open_recorder(s, resume=False, overwrite=True) as recorder:
            llm = s.sampler.engine._llm  # type: ignore[attr-defined]
            s.sync.push(0, s.probes(0))
            for step in range(1, num_steps + 1):
                problems = s.problems_of(step)
                # Each goes first in every second step.
                for side in ("ours", "bare") if step % 2 else ("bare", "ours"):
                    if side == "ours":
                        sides[side].append(ours(s, problems, step))
                    else:
                        sides[side].append(bare(llm, s, problems, step))
                run_step(s, recorder, step)
    speed = {side: [n / t for n, t in pairs] for side, pairs in sides.items()}
    return {
        "steps": num_steps,
        "ours_tokens_per_second": round(statistics.median(speed["ours"])),
        "bare_tokens_per_second": round(statistics.median(speed["bare"])),
        "ratio": round(
            statistics.median(a / b for a, b in zip(speed["ours"], speed["bare"], strict=True)), 3
        ),
        "same_tokens": [n for n, _ in sides["ours"]] == [n for n, _ in sides["bare"]],
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    print(json.dumps(measure(args.config, args.overrides, args.steps)))


if __name__ == "__main__":
    main()
