"""How well simulated steps agree with measured ones: the tiny reasoner on CPU ranks of one machine.

    OMP_NUM_THREADS=1 python benchmarks/simulation.py --dir DIR

Hardware figures are fitted (`plan calibrate`) to runs of one rank with other seeds, and partly with
other group sizes and micro-batches, than those that are compared; runs of 2 and 4 ranks are never
fitted. The simulation is told how many cores there were, which 4 ranks on 2 cores share: those of
the machine less what other processes took during the step. Steps count where these took at most
--others of the machine. Prints one JSON line; a ratio is simulated / measured seconds of a step,
medians, without a run's first two steps.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from threading import Event, Thread

import psutil
import torch
from ranks import run_main

from megatron_opsft.errors import UserError
from megatron_opsft.model.config_from_hf import read_model_shape
from megatron_opsft.plan.calibrate import calibrate
from megatron_opsft.plan.hardware import Hardware, figures_of, load_hardware
from megatron_opsft.plan.measured import PHASES, MeasuredRun, read_run
from megatron_opsft.plan.simulate import simulate_step
from megatron_opsft.weights.hf_files import resolve_model

CONFIG = Path(__file__).parents[1] / "examples" / "configs" / "quickstart.yaml"
SMALL = (
    "run.eval_every=0",
    "run.tensorboard=false",
    "eval.num_problems=1",
    "eval.samples_per_problem=1",
    "checkpoint.every=0",
    "rollout.batch_size=32",
)
# Name -> ranks and overrides.
FITTED = {
    "fit_1": (1, "run.seed=11"),
    "fit_1_small": (
        1,
        "run.seed=12",
        "rollout.group_size=4",
        "rollout.batch_size=64",
        "train.max_tokens_per_microbatch=1024",
    ),
}
COMPARED = {
    "ranks_1": (1, "run.seed=1"),
    "ranks_2": (2, "run.seed=2"),
    "ranks_4": (4, "run.seed=3"),
}


@dataclass(slots=True)
class Watch:
    """What the machine and this process's children have computed, over time, in seconds of CPU."""

    samples: list[tuple[float, float, float]] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sample ten times a second."""
        stop = Event()
        thread = Thread(target=self._sample, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _sample(self, stop: Event) -> None:
        spent: dict[int, float] = {}
        while not stop.wait(0.1):
            times = psutil.cpu_times()
            busy = sum(times) - times.idle - getattr(times, "iowait", 0.0)
            for child in psutil.Process().children(recursive=True):
                try:
                    used = child.cpu_times()
                    spent[child.pid] = used.user + used.system
                except psutil.Error:
                    continue
            self.samples.append((time.time(), busy, sum(spent.values())))

    def others(self, start: float, stop: float) -> float:
        """Share of the machine that other processes took between two times; 1 where not watched."""
        inside = [sample for sample in self.samples if start - 0.1 <= sample[0] <= stop + 0.1]
        if len(inside) < 2:
            return 1.0
        (t0, busy0, own0), (t1, busy1, own1) = inside[0], inside[-1]
        return max(0.0, (busy1 - busy0 - own1 + own0) / (t1 - t0) / os.cpu_count())


def start_run(
    directory: Path, ranks: int, overrides: tuple[str, ...], steps: int
) -> dict[int, float]:
    """Train; the share of the machine that others took, by step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "megatron_opsft", "train", str(CONFIG)]
    command += [f"run.dir={directory}", f"run.steps={steps}", *SMALL, *overrides]
    watch, ended = Watch(), {}
    with open(directory.with_suffix(".log"), "w") as log, watch.watching():
        process = subprocess.Popen(command, stdout=log, stderr=log)
        metrics = directory / "metrics.jsonl"
        while process.poll() is None:
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            for number in range(len(ended), len(lines)):
                ended[number] = time.time()
            time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"{directory.with_suffix('.log')}: exit code {process.returncode}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        line["step"]: watch.others(ended[number] - line["step_seconds"], ended[number])
        for number, line in enumerate(lines)
        if number in ended
    }


def measure(
    base: Path, name: str, runs: dict, hardware: Hardware, steps: int, allowed: float
) -> tuple[MeasuredRun, dict[int, float]]:
    """The run's steps that count, and by step what others took of the machine."""
    ranks, *overrides = runs[name]
    directory = base / name
    record = base / f"{name}.json"
    if not record.exists():
        record.write_text(json.dumps(start_run(directory, ranks, tuple(overrides), steps)))
    others = {int(step): share for step, share in json.loads(record.read_text()).items()}
    shape = read_model_shape(resolve_model("tiny_reasoner", ["config.json"]))
    run = read_run(directory, lambda path: shape, hardware, prompt_tokens=42, sigma=0.5)
    counted = tuple(step for step in run.steps if others.get(step.step, 1.0) <= allowed)
    return replace(run, steps=counted), others


def compare(run: MeasuredRun, others: dict[int, float], hardware: Hardware, cores: int) -> dict:
    """Medians of the steps that count."""
    if not run.steps:
        return {"steps": 0}
    simulated = []
    for step in run.steps:
        left = replace(hardware, node_cores=cores * (1 - others[step.step]))
        simulated.append(simulate_step(replace(run.job, hardware=left), step.workload))
    pairs = list(zip(simulated, run.steps, strict=True))
    return {
        "steps": len(pairs),
        "others": round(median(others[step.step] for step in run.steps), 2),
        "measured_seconds": round(median(step.total for step in run.steps), 3),
        "simulated_seconds": round(median(sim.total for sim in simulated), 3),
        "ratio": round(median(sim.total / step.total for sim, step in pairs), 3),
        "phases": {
            phase: [
                round(median(step.seconds[phase] for step in run.steps), 3),
                round(median(getattr(sim.on_rank_0, phase) for sim in simulated), 3),
            ]
            for phase in PHASES
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="of the runs; those there are used")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--others", type=float, default=0.5, help="of the machine, at most")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    base = load_hardware("cpu", node_cores=cores)
    asked = (base, args.steps, args.others)
    fitted = [measure(args.dir, name, FITTED, *asked)[0] for name in FITTED]
    if not any(run.steps for run in fitted):
        raise UserError(f"others took more than --others={args.others} of the machine: try again")
    hardware = calibrate([run for run in fitted if run.steps], base).hardware
    compared = {name: measure(args.dir, name, COMPARED, *asked) for name in COMPARED}
    result = {
        "benchmark": "simulation",
        "cores": cores,
        "threads": torch.get_num_threads(),
        "fitted_on": {run.name: len(run.steps) for run in fitted},
        "figures": {k: v for k, v in figures_of(hardware).items() if v != figures_of(base)[k]},
        "compared": {
            name: compare(run, others, hardware, cores) for name, (run, others) in compared.items()
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    run_main(main)
