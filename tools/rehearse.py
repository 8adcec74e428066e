"""A rehearsal of scale: what one rank of a large job does in a step beside computing, for real.

    python tools/rehearse.py [--ranks 8,64,512,4096] [--config FILE] [--json] [--out DIR]

The project's own functions run on a few ranks of the job (the first, the last of the first node,
one in the middle, the last), each in turn, on fake process groups of the whole job. The messages of
the other ranks are made up with the token counts that they would have (`rehearsal/fake_world.py`).
Without --config: the shipped 1.5B and 7B configurations and Qwen2.5-72B on TP 8 x PP 8, each with
B=1,024, G=16, L=8,192.

Printed for each part: seconds of CPU time, and bytes: received by the rank, and the peak of what
Python and numpy hold of it; of the slowest and of the fullest of the ranks.
"""

import argparse
import json
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rehearsal.fake_rank import fake_rank
from rehearsal.fake_world import FakeWorld
from rehearsal.figure import draw, show_table
from rehearsal.parts import StepParts
from rehearsal.weights import CheckpointParts, PushParts, stage_parts

from megatron_opsft.architectures.config_from_hf import read_model_shape
from megatron_opsft.config_file import load_config
from megatron_opsft.plan.hardware import load_hardware
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.runtime import cpu_compat
from megatron_opsft.storage.model_paths import resolve_config

STEP = ["data.prompts_per_step=1024", "rollout.group_size=16", "rollout.max_response_tokens=8192"]
CONFIGS = Path(__file__).resolve().parents[1] / "examples/configs"


def make_jobs(args: argparse.Namespace, world_size: int) -> dict[str, TrainingJob]:
    """Jobs by name. A job of 72B on fewer ranks than a replica's takes fewer stages."""
    hardware = load_hardware("h100")

    def job(path: Path, overrides: list[str]) -> TrainingJob:
        config = load_config(path, overrides)
        shape = read_model_shape(resolve_config(config.model.path))
        return TrainingJob(config=config, shape=shape, hardware=hardware, world_size=world_size)

    if args.config:
        return {args.config.stem: job(args.config, args.overrides)}
    large = ["model.path=Qwen/Qwen2.5-72B", "parallel.tp=8", "rollout.tp=8"]
    large += [f"parallel.pp={min(8, world_size // 8)}"]
    seven = CONFIGS / "r1_distill_7b_paper.yaml"
    jobs = {
        "1.5B": lambda: job(CONFIGS / "r1_distill_1p5b_paper.yaml", STEP + args.overrides),
        "7B": lambda: job(seven, STEP + args.overrides),
        "72B": lambda: job(seven, STEP + large + args.overrides),
    }
    return {name: jobs[name]() for name in args.models.split(",")}


class Clock:
    """Seconds and bytes of each part of a rank; a part is run twice, since watching memory takes
    time.
    """

    def __init__(self, world: FakeWorld) -> None:
        self._world = world
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, int] = {}

    def measure(self, part: str, run: Callable[[], Any]) -> Any:
        self._world.reset()
        begin = time.process_time()
        result = run()
        self.seconds[part] = time.process_time() - begin - self._world.own_seconds
        received = self._world.received
        del result
        tracemalloc.start()
        result = run()
        self.bytes[part] = tracemalloc.get_traced_memory()[1] + received
        tracemalloc.stop()
        return result


def rehearse(job: TrainingJob, rank: int) -> Clock:
    """All parts of one rank."""
    world = FakeWorld(rank, job.world_size)
    clock = Clock(world)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        parts = [] if rank else stage_parts(job, directory)
        with fake_rank(job, rank) as layout, world.installed():
            StepParts(job, layout, world, directory).run(clock.measure)
            PushParts(job, layout, world).run(clock.measure)
            CheckpointParts(job, layout, world, directory, parts).run(clock.measure)
    return clock


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a part, job and number of ranks."""
    rows = []
    for world_size in args.ranks:
        for name, job in make_jobs(args, world_size).items():
            last = world_size - 1
            clocks = [rehearse(job, r) for r in sorted({0, min(7, last), world_size // 2, last})]
            for part in clocks[0].seconds:  # rank 0 has them all
                row = {
                    "part": part,
                    "ranks": world_size,
                    "seconds": round(max(c.seconds.get(part, 0.0) for c in clocks), 4),
                    "bytes": max(c.bytes.get(part, 0) for c in clocks),
                    "model": name,
                    "layout": f"TP {job.parallel.tp} x PP {job.parallel.pp} x DP {job.dp}",
                }
                rows.append(row)
                if args.json:
                    print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--ranks", default="8,64,512,4096", help="numbers of ranks")
    parser.add_argument("--config", type=Path, help="a run's file, in place of the three jobs")
    parser.add_argument("--models", default="1.5B,7B,72B", help="which of the three jobs")
    parser.add_argument("--json", action="store_true", help="a line for each part at once")
    parser.add_argument("--out", type=Path, help="a directory for rehearsal.json, .md and .png")
    args = parser.parse_intermixed_args()
    args.ranks = [int(word) for word in args.ranks.split(",")]
    warnings.filterwarnings("ignore")
    cpu_compat.install()
    rows = measure(args)
    if not args.json:
        print(show_table(rows))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "rehearsal.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        (args.out / "rehearsal.md").write_text(show_table(rows), encoding="utf-8")
        draw(rows, args.out / "rehearsal.png")


if __name__ == "__main__":
    main()
