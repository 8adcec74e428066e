"""Runs of the trainer on a pretended GPU; started by `python -m pretend_gpu`, alone or by torchrun.

Prints JSON: what was wrong, and figures of the last step. Usage: pretended_runs.py DIRECTORY METHOD
[KEY=VALUE...], or pretended_runs.py DIRECTORY engine, or pretended_runs.py DIRECTORY offload
[KEY=VALUE...].
"""

import gc
import json
import os
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pretend_gpu import active
from run_differences import compare_runs, read_lines
from safetensors.torch import load_file
from small_run import QUICKSTART, SMALL_RUN

from megatron_opsft.config.load import load_config
from megatron_opsft.config.training import OFFLOAD_LEVELS
from megatron_opsft.rollout import limits, open_engine
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.run.record.recorder import RunRecorder
from megatron_opsft.run.start.check import check_on_job
from megatron_opsft.run.sync.weight_sync import WeightSync
from megatron_opsft.run.train import train

STEPS = 2
RUN = [
    *(key for key in SMALL_RUN if key != "run.device=cpu"),
    "run.device=cuda",
    "model.dtype=bfloat16",
    f"run.steps={STEPS}",
    "eval.num_problems=1",
    "eval.max_response_tokens=8",
    "checkpoint.every=1",
    "checkpoint.asynchronous=false",
]


class ReadingEngine(HfEngine):
    """An engine that reads files and hands out its weights, as vLLM does."""

    def copy_files(self, names_by_file: Mapping[Path, Collection[str]]) -> None:
        read = ((load_file(file), names) for file, names in names_by_file.items())
        self.copy_weights((n, held[n]) for held, names in read for n in names)


def run(run_dir: Path, keys: list[str], *, resume: bool = False) -> list[dict[str, Any]]:
    """The metrics of a run that ends well."""
    config = load_config(Path(QUICKSTART), [*RUN, *keys, f"run.dir={run_dir}"])
    # As a later start of these ranks: torchrun's store has the first run's addresses still.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(resume))
    code = train(check_on_job(config), resume=resume)
    assert code == 0, f"exit code {code}"
    return read_lines(run_dir / "metrics.jsonl")


def whole_and_resumed(directory: Path, keys: list[str]) -> tuple[list[str], dict[str, Any]]:
    """A run, and the same one resumed from a copy of how it was after its first step."""
    whole, resumed = directory / "whole", directory / "resumed"
    checkpoint = RunRecorder.checkpoint

    def copied(self: RunRecorder, step: int, **how: Any) -> None:
        checkpoint(self, step, **how)
        if step == 1 and torch.distributed.get_rank() == 0:
            shutil.copytree(whole, resumed)

    with patch.object(RunRecorder, "checkpoint", copied):
        lines = run(whole, keys)
    run(resumed, keys, resume=True)
    return compare_runs(whole, resumed), lines[-1]


def from_engine(directory: Path) -> tuple[list[str], dict[str, Any]]:
    """Weights come from an engine and go back to it in place, against weights from disk."""
    traits = replace(limits.ENGINES["hf"], reads_files=True)
    pushed: list[str] = []
    push = WeightSync.push

    def noted(self: WeightSync, *args: Any) -> Any:
        result = push(self, *args)
        pushed.append(result.path)
        assert all(t.is_cuda for t in self.engine.weights().values())
        return result

    with (
        patch.dict(limits.ENGINES, hf=traits),
        patch.object(open_engine, "HfEngine", ReadingEngine),
        patch.object(WeightSync, "push", noted),
    ):
        lines = run(directory / "engine", ["model.load=engine"])
        run(directory / "disk", ["model.load=disk"])
    problems = compare_runs(directory / "engine", directory / "disk")
    if pushed != ["stream", *["in_place"] * STEPS] * 2:
        problems.append(f"pushes went {pushed}")
    return problems, lines[-1]


def with_sleeps(directory: Path, keys: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The same run at every level of `train.offload`, checkpoints too; the line has the bytes on
    the GPU, and those of the host that it pins, while the engine samples, by level.
    """
    (gpu,) = active
    problems: list[str] = []
    sampling: dict[str, int] = {}
    pinned: dict[str, int] = {}
    generate = HfEngine.generate

    def counted(self: HfEngine, *args: Any) -> Any:
        gc.collect()  # a run before is in cycles
        sampling[level], pinned[level] = gpu.num_bytes, gpu.pinned_bytes
        return generate(self, *args)

    with patch.object(HfEngine, "generate", counted):
        for level in OFFLOAD_LEVELS:
            lines = run(directory / level, [*keys, f"train.offload={level}"])
            problems += compare_runs(directory / "none", directory / level)
            manifests = [directory / at / "checkpoints/step_000002" for at in ("none", level)]
            one, other = (json.loads((m / "complete.json").read_text()) for m in manifests)
            if one["files"]["__0_0.distcp"] != other["files"]["__0_0.distcp"]:
                problems.append(f"{level}: the checkpoint differs")
    weights = load_file(directory / "none/hf/model.safetensors").values()
    num_parameters = sum(weight.numel() for weight in weights)
    found = {"sampling": sampling, "pinned": pinned, "num_parameters": num_parameters}
    return problems, lines[-1] | found


def main() -> None:
    """Run, compare, print."""
    directory, what, *keys = sys.argv[1:]
    if what == "engine":
        problems, line = from_engine(Path(directory))
    elif what == "offload":
        problems, line = with_sleeps(Path(directory), keys)
    else:
        problems, line = whole_and_resumed(Path(directory), [f"method.name={what}", *keys])
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps({"problems": problems, "line": line}))


if __name__ == "__main__":
    main()
