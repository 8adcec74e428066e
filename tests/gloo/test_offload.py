"""A trainer that sleeps while the engine samples trains the same run to the last bit."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from jobs import Built, Case, as_arrays, build, exported, train_steps
from megatron.core import parallel_state
from plan_jobs import planned_run
from run_differences import compare_runs
from small_run import QUICKSTART, SMALL_RUN
from tiers import for_release
from world import World

from megatron_opsft.commands.plan.assumptions import load_hardware
from megatron_opsft.commands.plan.memory import offload_bytes, rank_memory
from megatron_opsft.config.load import load_config
from megatron_opsft.config.training import OFFLOAD_LEVELS, OffloadLevel
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.run.record import evaluations
from megatron_opsft.run.run_files import read_json_lines
from megatron_opsft.run.start.check import check_on_job
from megatron_opsft.run.train import train
from megatron_opsft.trainer.model.offload import Offload

RUN = [
    *SMALL_RUN,
    "run.steps=2",
    "run.eval_every=1",
    "model.dtype=bfloat16",
    "optimizer.lr=1e-3",
    "optimizer.schedule=constant",
    "rollout.max_response_tokens=64",
    "data.prompts_per_step=2",
    "eval.num_problems=1",
    "eval.max_response_tokens=8",
    "eval.export_best=true",
    "checkpoint.every=1",
    "checkpoint.keep=3",
    "method.name=grpo",
    "method.beta=0.04",
    "method.overlong_buffer=40",
    "method.updates_per_batch=2",
]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "vpp2": (2, ["parallel.pp=2", "parallel.vpp=2"]),
    "dp2 float32": (2, ["model.dtype=float32"]),
}
COMBINED: dict[str, tuple[int, list[str]]] = {
    "tp2": (2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    "cp2": (2, ["parallel.cp=2"]),
}
Away = list[dict[str, int]]


@contextmanager
def watched_sleep() -> Iterator[Away]:
    """What is away each time that the engine samples."""
    made: list[Offload] = []
    away: Away = []
    make, generate = Offload.__init__, HfEngine.generate

    def noted(self: Offload, *args: Any) -> None:
        make(self, *args)
        made.append(self)

    def generated(self: HfEngine, *args: Any) -> Any:
        away.append(made[-1].bytes_away)
        return generate(self, *args)

    with patch.object(Offload, "__init__", noted), patch.object(HfEngine, "generate", generated):
        yield away


def run_here(words: Sequence[str], resume: bool) -> tuple[int, Away]:
    """A run of the trainer, or the rest of one; its exit code."""
    newest = patch.object(evaluations, "best_evaluation", lambda lines, settings: lines[-1])
    with watched_sleep() as away, newest:  # every model is written to best/, too
        code = train(check_on_job(load_config(Path(QUICKSTART), [*words])), resume=resume)
    return code, away


def run(world: World, run_dir: Path, ranks: int, *keys: str, resume: bool = False) -> Away:
    words = [*RUN, *keys, f"run.dir={run_dir}"]
    ended = world.run(run_here, ranks, words, resume)
    assert [code for code, _ in ended] == [0] * ranks
    return ended[0][1]


def check_sleep(run_dir: Path, away: Away, level: str) -> None:
    """Nothing was left on the device that the level gives up, whenever the engine sampled."""
    depth = OFFLOAD_LEVELS.index(level)
    assert len(away) >= 4  # two evaluations, two steps
    for held in away:
        assert [size > 0 for size in held.values()] == [depth >= n for n in (1, 2, 3)]
    for line in read_json_lines(run_dir / "metrics.jsonl"):
        assert line["grad_norm"] > 0 and line["kl_mean"] is not None
        assert ("offload_seconds" in line) == (depth > 0)


def saved(run_dir: Path) -> dict[str, list[int]]:
    """Size and checksum of every file with tensors in the checkpoints."""
    found = {}
    for path in sorted(run_dir.glob("checkpoints/step_*/complete.json")):
        files = json.loads(path.read_text())["files"]
        for name, sums in files.items():
            if name.endswith(".distcp"):
                found[f"{path.parent.name}/{name}"] = sums
    return found


def check_same(one: Path, other: Path) -> None:
    assert compare_runs(one, other) == []
    assert saved(one) == saved(other)
    assert {*saved(one)} >= {"step_000001/__0_0.distcp", "step_000002/__0_0.distcp"}
    for directory in (one, other):
        assert (directory / "hf/model.safetensors").is_file()
    best = [{p.name: p.read_bytes() for p in d.glob("best/*/*.safetensors")} for d in (one, other)]
    assert best[0] == best[1] != {}


@pytest.mark.parametrize("layout", [*LAYOUTS, *for_release(COMBINED)])
def test_a_run_whose_trainer_sleeps_is_the_same_run(
    world: World, tmp_path: Path, layout: str
) -> None:
    """With a reference, evaluations, checkpoints in the background, a resume, best/ and hf/."""
    ranks, keys = (LAYOUTS | COMBINED)[layout]
    away = run(world, tmp_path / "none", ranks, *keys)
    check_sleep(tmp_path / "none", away, "none")
    levels = ["all"]
    if layout == "one":
        levels += ["gradients", "optimizer"]
    for level in levels:
        words = [*keys, f"train.offload={level}"]
        run_dir = tmp_path / level
        away = run(world, run_dir, ranks, *words, "run.steps=1")
        away += run(world, run_dir, ranks, *words, resume=True)
        check_sleep(run_dir, away, level)
        check_same(tmp_path / "none", run_dir)


def test_experts_sleep_too(world: World) -> None:
    case = Case(model="qwen3_moe", dp=2, ep=2, dtype="bfloat16")
    for sleeping, awake in world.run(both_ways, 2, case):
        assert sleeping == awake


STAGES = {
    "thinkprune": ["method.limits=64,50", "method.stage_steps=1"],
    "self_distillation": ["method.refresh_every=1", "method.responses=all"],
}


@pytest.mark.parametrize("method", STAGES)
def test_a_stage_begins_while_the_trainer_sleeps(world: World, tmp_path: Path, method: str) -> None:
    """Moments become zero and the weights the reference where they are: in host memory."""
    for level in ("none", "all"):
        keys = [f"method.name={method}", *STAGES[method], f"train.offload={level}"]
        words = [key for key in RUN if not key.startswith(("method.updates", "method.overlong"))]
        words = [key for key in words if method == "thinkprune" or "method.beta" not in key]
        ended = world.run(run_here, 1, [*words, *keys, f"run.dir={tmp_path / level}"], False)
        assert ended[0][0] == 0
    check_same(tmp_path / "none", tmp_path / "all")


def both_ways(case: Case) -> tuple[Any, Any]:
    """Steps with and without sleeps between them: results and weights."""
    found = []
    for level in ("all", "none"):
        built = build(case)
        offload = Offload(built.trainer, level)
        results = []
        for step in range(3):
            offload.begin_sleep()
            offload.sleep()
            offload.sleep()  # twice is once
            offload.wake()
            results += train_steps(built, case, range(step, step + 1))
        weights = as_arrays(exported(built))
        found.append((results, {name: value.tobytes() for name, value in weights.items()}))
        parallel_state.destroy_model_parallel()
    return found[0], found[1]


PLANNED = [
    Case(dtype="bfloat16"),
    Case(tp=2, dp=2),
    Case(model="qwen2_tied", pp=2, dtype="bfloat16"),
    Case(cp=2, dtype="bfloat16"),
    Case(model="qwen3_moe", dp=2, ep=2, dtype="bfloat16"),
]


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_what_is_given_up_while_sampling_is_what_a_plan_of_a_gpu_says(
    world: World, case: Case
) -> None:
    """By what it holds, and no more: gradients in a weight sync too, nothing in training."""
    gpu = replace(planned_run(case, tokens=512), hardware=load_hardware("h100"))
    for level in OFFLOAD_LEVELS:
        ranks = world.run(given_up, case.world_size, case, level)
        for pp_rank, beside_sync, asleep in ranks:
            stage = gpu.stages[pp_rank]
            full, less = (rank_memory(gpu.with_offload(at), stage, 1) for at in ("none", level))
            assert full.terms == less.terms
            saved = {phase: full.phases[phase] - less.phases[phase] for phase in full.phases}
            assert saved["train"] == 0
            # Megatron pads its buffers, those of tiny parameters by more than those of real ones.
            assert sum(beside_sync.values()) == pytest.approx(saved["sync"], rel=0.01)
            assert sum(asleep.values()) == pytest.approx(saved["rollout"], rel=0.01)
            held = [n for n, size in enumerate(asleep.values()) if size]
            for name, size in asleep.items():
                assert size in (0, pytest.approx(less.terms[name], rel=0.01))
            assert held == list(range(OFFLOAD_LEVELS.index(level)))
            copied = asleep["optimizer"] + asleep["weights"]
            assert copied == pytest.approx(offload_bytes(gpu.with_offload(level), stage), rel=0.01)


def given_up(case: Case, level: OffloadLevel) -> tuple[int, dict[str, int], dict[str, int]]:
    """This rank's stage, and its bytes away while weights are synced and while it sleeps: sizes
    of storages that are empty then.
    """
    built = build(case)
    offload = Offload(built.trainer, level)
    tensors: dict[str, list[torch.Tensor]] = {"gradients": [], "optimizer": [], "weights": []}
    for chunk in built.trainer.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            tensors["gradients"].append(buffer.grad_data)
            tensors["weights"].append(buffer.param_data)
    tensors["optimizer"] = [t for t in state_of(built)[len(built.shards.parameters) :]]
    full = {name: num_bytes(held) for name, held in tensors.items()}
    offload.begin_sleep()
    beside_sync = {name: full[name] - num_bytes(held) for name, held in tensors.items()}
    offload.sleep()
    asleep = {name: full[name] - num_bytes(held) for name, held in tensors.items()}
    assert asleep == offload.bytes_away
    offload.wake()
    assert {name: num_bytes(held) for name, held in tensors.items()} == full
    parallel_state.destroy_model_parallel()
    return built.layout.pp_rank, beside_sync, asleep


def num_bytes(tensors: list[torch.Tensor]) -> int:
    """Of their storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("case", [Case(dtype="bfloat16"), Case(tp=2, dp=2)], ids=str)
def test_values_are_read_where_they_are(world: World, case: Case) -> None:
    world.run(read_asleep, case.world_size, case)


def read_asleep(case: Case) -> None:
    """Weights, main weights and moments, by `stored` and `on_device`; none by themselves."""
    built = build(case)
    train_steps(built, case, range(1))
    offload = Offload(built.trainer, "all")
    tensors = state_of(built)
    before = [tensor.clone() for tensor in tensors]
    offload.sleep()
    for tensor, value in zip(tensors, before, strict=True):
        assert tensor.untyped_storage().nbytes() == 0
        assert torch.equal(offload.stored(tensor), value)
        assert torch.equal(offload.on_device(tensor), value)
        offload.stored(tensor).mul_(2)
    offload.wake()
    for tensor, value in zip(tensors, before, strict=True):
        assert torch.equal(tensor, 2 * value)
        assert offload.stored(tensor) is tensor


def state_of(built: Built) -> list[torch.Tensor]:
    """Weights, and of each range that this rank updates its moments; main weights in bfloat16."""
    tensors = [tensor for _, tensor in built.shards.parameters]
    for member in built.trainer.optimizer.chained_optimizers:
        for main, state in member.optimizer.state.items():  # type: ignore[attr-defined]
            tensors += [state["exp_avg"], state["exp_avg_sq"]]
            if built.shards.dtype == torch.bfloat16:
                tensors.append(main.detach())
    return tensors
