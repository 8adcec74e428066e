"""The stages `quickstart` and `vllm_quickstart`: steps of on-policy SFT of the shipped model.

bfloat16 on a GPU, float32 on a CPU, on the quickstart's configuration made small
(tests/support/vllm_jobs.py).
"""

import argparse
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from proof.stage import publish
from vllm_jobs import opened

from megatron_opsft.records import SyncResult
from megatron_opsft.run.train import run_step
from megatron_opsft.runtime.device import peak_memory_bytes

# Mean difference of engine and trainer log-probs; README's alarm for each dtype.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.05}


def problems_of(lines: list[dict[str, Any]], push: SyncResult, dtype: str) -> list[str]:
    """What is wrong with a run that came to its end."""
    found = []
    if not any(line["num_accepted"] for line in lines):
        found.append("no response was accepted, so nothing was learned")
    worst = max(line["logprob_diff_mean"] for line in lines)
    if not worst <= BOUNDS[dtype]:
        found.append(f"log-probs of engine and trainer differ by {worst:.2e} on average")
    if push.path != "in_place":
        found.append(f"the last push went as a {push.path}; all but the first should be in_place")
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--engine", choices=("hf", "vllm"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rollout-tp", type=int, default=1, help="of as many ranks")
    args = parser.parse_args()
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    overrides = [f"run.device={args.device}", f"rollout.engine={args.engine}"]
    overrides += [f"model.dtype={dtype}", f"run.steps={args.steps}"]
    overrides += [f"rollout.tp={args.rollout_tp}", f"parallel.tp={min(args.rollout_tp, 2)}"]
    if args.engine == "vllm" and args.device == "cuda":
        overrides.append("rollout.kv_cache_bytes=4000000000")
    with ExitStack() as stack:
        # All ranks of torchrun need the same one: TMPDIR is a stage's own.
        folder = tempfile.gettempdir()
        if "RANK" not in os.environ:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        run_dir = Path(folder) / "run"
        with opened(run_dir, overrides) as (session, recorder):
            for step in range(1, args.steps + 1):
                run_step(session, recorder, step)
            push = session.sync.push(args.steps + 1, session.probes(args.steps + 1))
            peak_bytes = peak_memory_bytes(session.device)
        text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    if int(os.environ.get("RANK", "0")):
        return
    lines = [json.loads(line) for line in text.splitlines()]
    later = lines[1:]  # the first compiles
    tokens = sum(line["num_rollouts"] * line["mean_response_tokens"] for line in later)
    figures = {
        "rollout_tokens_per_second": tokens / sum(line["rollout_seconds"] for line in later),
        "train_seconds": statistics.median(line["train_seconds"] for line in later),
        "sync_seconds": statistics.median(line["sync_seconds"] for line in later),
        "logprob_diff_mean": max(line["logprob_diff_mean"] for line in lines),
        "logprob_diff_max": max(line["logprob_diff_max"] for line in lines),
    }
    details = {"metrics": lines, "torch_peak_bytes": peak_bytes}
    publish(figures, problems_of(lines, push, dtype), details)


if __name__ == "__main__":
    main()
