"""Seconds of a step with `rollout.overlap` and without, on one separate engine.

    python benchmarks/overlap.py [--config CONFIG] [--steps N] [section.key=value ...]

Every step is made both ways from the same weights (the learning rate is negligible), in turn, who
goes first alternating: sampled, judged, packed and trained on. By default the quickstart's model
with few responses at a time and small micro-batches, so that much is accepted long before all is
decoded. Prints one JSON line: median seconds, the median of the steps' ratios, the share of the
trained responses that were added up while others were decoded, and the largest relative difference
of loss and gradient norm. Give trainer and engine a core each.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from megatron_opsft.config_file import load_config
from megatron_opsft.records import StepResult
from megatron_opsft.runtime.stopwatch import Stopwatch
from megatron_opsft.session import Session, open_session
from megatron_opsft.step.batch import pack_updates, sample_batch
from megatron_opsft.step.judged_problems import Judge, judge_problems
from megatron_opsft.step.overlap import judge_while_training

CONFIG = Path(__file__).parents[1] / "examples/configs/quickstart.yaml"
DEFAULTS = [
    "rollout.placement=separate",
    "rollout.batch_size=32",
    "rollout.max_response_tokens=160",
    "train.max_tokens_per_microbatch=2048",
    "eval.num_problems=1",
    "run.device=cpu",
]


def one_step(s: Session, step: int, judge: Judge) -> tuple[float, float, StepResult]:
    """Seconds, the share that was added up early, and what the trainer says."""
    start = time.perf_counter()
    watch = Stopwatch(s.device)
    batch = sample_batch(s, step, watch, judge)
    (update,) = pack_updates(s, batch, watch)
    result = s.trainer.step(update.microbatches, update.factor, 1e-12)
    seconds = time.perf_counter() - start
    return seconds, len(batch.added) / max(len(batch.trained), 1), result


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    ways: dict[str, Judge] = {"without": judge_problems, "with": judge_while_training}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    shares, differences = [], [0.0]
    with tempfile.TemporaryDirectory() as directory:
        overrides = [*DEFAULTS, *options.overrides, f"run.dir={directory}/run"]
        with open_session(load_config(options.config, overrides)) as s:
            s.sync.push(0)
            for step in range(1, options.steps + 1):
                found = {}
                for name in sorted(ways, reverse=bool(step % 2)):
                    found[name] = one_step(s, step, ways[name])
                    seconds[name].append(found[name][0])
                shares.append(found["with"][1])
                ours, theirs = found["with"][2], found["without"][2]
                differences.append(abs(ours.loss / theirs.loss - 1))
                differences.append(abs(ours.grad_norm / theirs.grad_norm - 1))
    ratios = [a / b for a, b in zip(seconds["without"], seconds["with"], strict=True)]
    print(
        json.dumps(
            {
                "seconds_without": round(statistics.median(seconds["without"]), 3),
                "seconds_with": round(statistics.median(seconds["with"]), 3),
                "speedup": round(statistics.median(ratios), 3),
                "speedups": [round(ratio, 3) for ratio in sorted(ratios)],
                "overlap_share": round(statistics.median(shares), 3),
                "largest_difference": max(differences),
            }
        )
    )


if __name__ == "__main__":
    main()
