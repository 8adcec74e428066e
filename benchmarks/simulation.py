"""How well simulated steps agree with measured ones: the tiny reasoner on CPU ranks of one machine.

    OMP_NUM_THREADS=1 python benchmarks/simulation.py --dir DIR

Hardware figures are fitted (`plan calibrate`) to runs of one rank with other seeds, and partly with
other group sizes and micro-batches, than those that are compared; runs of 2 and 4 ranks are never
fitted. The simulation is told how many cores there were, which 4 ranks on 2 cores share: those of
the machine less what other processes took during the step. Steps count where these took at most
--others of the machine and the ranks' cores ran at --speed of their best or more (see `cores`); a
single rank stays on one core, and runs go on until enough steps count. Prints one JSON line; a
ratio is simulated / measured seconds of a step, medians, without a run's first two steps. Phases
are [measured on rank 0, simulated on the slowest rank].
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cores import Machine, Watch, fastest_core
from ranks import run_main

from megatron_opsft.architectures.config_from_hf import read_model_shape
from megatron_opsft.errors import UserError
from megatron_opsft.plan.calibrate import calibrate
from megatron_opsft.plan.hardware import Hardware, figures_of, load_hardware
from megatron_opsft.plan.measured import PHASES, WARM_UP_STEPS, MeasuredRun, read_run
from megatron_opsft.plan.step import estimate_step
from megatron_opsft.storage.model_paths import resolve_model

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


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which steps count; how many of a run must; and after how many of all it ends in any case."""

    others: float
    speed: float
    count: int
    most: int

    def counts(self, machine: Machine, best_probe: float) -> bool:
        """best_probe: seconds of a probe at full speed."""
        return machine.others <= self.others and machine.probe * self.speed <= best_probe


@dataclass(frozen=True, slots=True)
class Watched:
    """A run, and by step what the machine was like; best_probe: the best that was seen so far."""

    run: MeasuredRun
    machines: dict[int, Machine]
    best_probe: float


def start_run(
    directory: Path, ranks: int, overrides: tuple[str, ...], wanted: Wanted, watch: Watch
) -> dict[int, Machine]:
    """Train until enough steps count; by step what the machine was like."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "megatron_opsft", "train", str(CONFIG)]
    command += [f"run.dir={directory}", f"run.steps={wanted.most}", *SMALL, *overrides]
    cores = {fastest_core()} if ranks == 1 else os.sched_getaffinity(0)
    machines: dict[int, Machine] = {}
    metrics = directory / "metrics.jsonl"
    with open(directory.with_suffix(".log"), "w") as log, watch.watching():
        process = subprocess.Popen(command, stdout=log, stderr=log)
        os.sched_setaffinity(process.pid, cores)  # it has not started anything yet
        enough = False
        while process.poll() is None:
            time.sleep(0.02)
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            for text in lines[len(machines) :]:
                line, now = json.loads(text), time.time()
                machines[line["step"]] = watch.machine(now - line["step_seconds"], now, cores)
            best = watch.best_probe()
            counted = sum(wanted.counts(machine, best) for machine in machines.values())
            if counted >= wanted.count + WARM_UP_STEPS and not enough:
                enough = True
                process.terminate()
    if process.returncode and not enough:
        raise RuntimeError(f"{directory.with_suffix('.log')}: exit code {process.returncode}")
    return machines


def measure(base: Path, name: str, hardware: Hardware, wanted: Wanted, watch: Watch) -> Watched:
    """A run, made now unless it is there."""
    ranks, *overrides = {**FITTED, **COMPARED}[name]
    record = base / f"{name}.json"
    if not record.exists():
        machines = start_run(base / name, ranks, tuple(overrides), wanted, watch)
        found = {"best_probe": watch.best_probe(), "steps": [*machines.items()]}
        record.write_text(json.dumps(found, default=asdict))
    found = json.loads(record.read_text())
    shape = read_model_shape(resolve_model("tiny_reasoner", ["config.json"]))
    run = read_run(base / name, lambda path: shape, hardware, prompt_tokens=42, sigma=0.5)
    machines = {step: Machine(**machine) for step, machine in found["steps"]}
    return Watched(run, machines, found["best_probe"])


def counted(watched: Watched, wanted: Wanted, best_probe: float) -> MeasuredRun:
    """The run's steps that count."""
    found, run = watched.machines, watched.run
    steps = [s for s in run.steps if s.step in found and wanted.counts(found[s.step], best_probe)]
    return replace(run, steps=tuple(steps))


def compare(run: MeasuredRun, watched: Watched, hardware: Hardware, cores: int) -> dict[str, Any]:
    """Medians over the steps that count."""
    if not run.steps:
        return {"steps": 0}
    others = [watched.machines[step.step].others for step in run.steps]
    simulated = []
    for step, share in zip(run.steps, others, strict=True):
        left = replace(hardware, node_cores=cores * (1 - share))
        simulated.append(estimate_step(replace(run.job, hardware=left), step.workload))
    pairs = list(zip(simulated, run.steps, strict=True))
    return {
        "steps": len(pairs),
        "of": len(watched.run.steps),
        "others": round(median(others), 2),
        "measured_seconds": round(median(step.total for step in run.steps), 3),
        "simulated_seconds": round(median(sim.total for sim in simulated), 3),
        "ratio": round(median(sim.total / step.total for sim, step in pairs), 3),
        "phases": {
            phase: [
                round(median(step.seconds[phase] for step in run.steps), 3),
                round(median(getattr(sim, phase) for sim in simulated), 3),
            ]
            for phase in PHASES
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="of the runs; those there are used")
    parser.add_argument("--steps", type=int, default=12, help="of each run that must count")
    parser.add_argument("--most", type=int, default=300, help="steps of a run at most")
    parser.add_argument("--others", type=float, default=0.1, help="of the machine, at most")
    parser.add_argument("--speed", type=float, default=0.85, help="of the best, at least")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    base = load_hardware("cpu", node_cores=cores)
    wanted = Wanted(args.others, args.speed, args.steps, args.most)
    watch = Watch()
    found = {name: measure(args.dir, name, base, wanted, watch) for name in (*FITTED, *COMPARED)}
    best_probe = min(watched.best_probe for watched in found.values())
    runs = {name: counted(watched, wanted, best_probe) for name, watched in found.items()}
    fitted = [runs[name] for name in FITTED if runs[name].steps]
    if not fitted:
        raise UserError("no step of the fitted runs counts: try again when the machine is quiet")
    hardware = calibrate(fitted, base).hardware
    result = {
        "benchmark": "simulation",
        "cores": cores,
        "threads": torch.get_num_threads(),
        "fitted_on": {run.name: len(run.steps) for run in fitted},
        "figures": {k: v for k, v in figures_of(hardware).items() if v != figures_of(base)[k]},
        "compared": {name: compare(runs[name], found[name], hardware, cores) for name in COMPARED},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    run_main(main)
