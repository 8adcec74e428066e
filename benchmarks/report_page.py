"""Seconds and peak memory of `report` for a large run: 300 steps x 512 responses x 2,000 tokens.

The run is made up: ten different steps, whose files stand in for all others by links. What the
command takes in all, its start included, is beside what it takes for reading the same lines alone.
"""

import argparse
import gzip
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_opsft.runtime.step_names import rollout_name

_DIFFERENT = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--responses", type=int, default=512, help="of a step")
    parser.add_argument("--tokens", type=int, default=2000, help="of a response")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        make_run(run, given.steps, given.responses, given.tokens)
        began = time.monotonic()
        num_bytes = sum(len(line) for line in lines_of(run))
        reading = time.monotonic() - began
        began = time.monotonic()
        command = [sys.executable, "-m", "megatron_opsft", "report", str(run)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - began
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        measured = {
            "steps": given.steps,
            "responses": given.steps * given.responses,
            "gigabytes": round(num_bytes / 1e9, 2),
            "reading_seconds": round(reading, 1),
            "report_seconds": round(seconds, 1),
            "peak_megabytes": round(peak / 1e6),
            "page_megabytes": round((run / "report.html").stat().st_size / 1e6, 1),
        }
    print(json.dumps(measured))


def make_run(run: Path, steps: int, responses: int, tokens: int) -> None:
    (run / "rollouts").mkdir()
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 5))) for _ in range(3000)]
    for step in range(1, steps + 1):
        path = run / "rollouts" / rollout_name(step)
        if step > _DIFFERENT:
            os.link(run / "rollouts" / rollout_name(1 + (step - 1) % _DIFFERENT), path)
            continue
        lines = [_line(draw, words, step, n, tokens) for n in range(responses)]
        path.write_bytes(gzip.compress("".join(lines).encode(), compresslevel=1))
    metrics = [
        {"step": n, "loss": 1 / n, "num_accepted": 1, "step_seconds": 1.0}
        for n in range(1, steps + 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))


def _line(draw: random.Random, words: list[str], step: int, number: int, tokens: int) -> str:
    line = {
        "problem_id": f"problem-{step}-{number // 8}",
        "sample_index": number % 8,
        "problem": " ".join(draw.choices(words, k=60)),
        "gold": "42",
        "outcome": draw.choice(("correct", "wrong")),
        "answer": "41",
        "reward": 1.0,
        "advantage": 0.5,
        "finish_reason": "stop",
        "num_prompt_tokens": 80,
        "num_tokens": tokens,
        "weight_version": step - 1,
        "text": " ".join(draw.choices(words, k=tokens)),
        "response_ids": draw.choices(range(150_000), k=tokens),
    }
    return json.dumps(line, ensure_ascii=False) + "\n"


def lines_of(run: Path) -> Iterator[bytes]:
    for path in sorted((run / "rollouts").iterdir()):
        with gzip.open(path) as file:
            yield from file


if __name__ == "__main__":
    main()
