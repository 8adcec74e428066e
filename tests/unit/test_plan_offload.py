"""What a plan says of a trainer that sleeps while the engine samples (`train.offload`)."""

import os
from dataclasses import replace

import pytest
from forked_cli import ROOT
from plan_cases import LARGE, SMALL, make_run, planned

from megatron_opsft.commands.plan import least_offload
from megatron_opsft.commands.plan.assumptions import load_hardware
from megatron_opsft.commands.plan.estimate import Plan
from megatron_opsft.commands.plan.job import make_planned_run
from megatron_opsft.commands.plan.search import search_layouts
from megatron_opsft.commands.plan.show import show_plan, verdict_line
from megatron_opsft.config.load import load_config
from megatron_opsft.config.training import OFFLOAD_LEVELS
from megatron_opsft.run.start.checked_run import make_checked_run
from megatron_opsft.runtime import device as runtime_device

SEVEN, THIRTY_TWO = "DeepSeek-R1-Distill-Qwen-7B", "DeepSeek-R1-Distill-Qwen-32B"
TP2 = ["parallel.tp=2", "parallel.sequence_parallel=true", "train.recompute=full", "rollout.tp=2"]
SPARING = ["train.max_tokens_per_microbatch=4608", "rollout.deep_sleep=true"]


def two_gpus(*overrides: str) -> Plan:
    """7B on two H100."""
    return planned(make_run(SEVEN, 2, *TP2, *overrides))


def test_each_level_takes_one_term_out_of_the_rollout() -> None:
    """Gradients are not there in a weight sync either: what leaves beside it still is."""
    none = two_gpus().worst
    terms = none.terms
    sampling, synced = none.phases["rollout"], none.phases["sync"]
    for level, term in zip(OFFLOAD_LEVELS[1:], ("gradients", "optimizer", "weights"), strict=True):
        found = two_gpus(f"train.offload={level}").worst
        sampling -= terms[term]
        synced -= terms[term] if level == "gradients" else 0
        assert found.terms == terms
        assert found.phases["rollout"] == pytest.approx(sampling)
        assert found.phases["sync"] == pytest.approx(synced)
        assert found.phases["train"] == none.phases["train"]


def test_seconds_are_those_of_the_copies_that_no_sync_hides() -> None:
    """At 64 GB/s: the optimizer's bytes and the weights', and back, less what a sync hides."""
    plan = {level: two_gpus(f"train.offload={level}") for level in OFFLOAD_LEVELS}
    (stage,) = plan["none"].run.stages
    to_host = stage.optimizer_bytes / 64e9
    assert to_host == pytest.approx(0.714, abs=1e-3)
    assert plan["none"].step["sync"] > to_host  # all is hidden on the way out
    seconds = [plan[level].step["offload"] for level in OFFLOAD_LEVELS]
    weights = 2 * stage.weight_bytes / 64e9
    assert seconds == pytest.approx([0, 0, to_host, to_host + weights])
    short = plan["optimizer"].run.hardware.model_copy(update={"sync_seconds": 0.0})
    step = planned(replace(plan["optimizer"].run, hardware=short)).step
    assert step["sync"] < to_host
    assert step["offload"] == pytest.approx(2 * to_host - step["sync"])
    for name, each in plan.items():
        assert ("offload" in each.phases) == (name in ("optimizer", "all"))
        phases = (each.step[phase] for phase in each.phases)
        assert each.step["total"] == pytest.approx(sum(phases))


def test_host_memory_holds_what_left_and_of_a_checkpoint_only_what_did_not() -> None:
    found = {}
    for level in OFFLOAD_LEVELS:
        plan = two_gpus(f"train.offload={level}")
        found[level] = plan.offload_host_bytes, plan.pinned_copy_bytes
        assert plan.pinned_bytes == sum(found[level])
    (stage,) = plan.run.stages
    each = stage.updated_parameters  # two ranks of a node
    assert found["none"] == found["gradients"] == (0, 2 * 14 * each)
    assert found["optimizer"] == (2 * 12 * each, pytest.approx(2 * 2 * each))
    assert found["all"] == (2 * (12 * each + stage.weight_bytes), 0)
    text = show_plan(two_gpus("train.offload=optimizer"))
    pinned = "15.2 GB of its host memory for the copy of a checkpoint and 91.4 GB for what the"
    assert pinned in text
    in_float32 = two_gpus("train.offload=optimizer", "model.dtype=float32")
    (stage,) = in_float32.run.stages
    assert in_float32.offload_host_bytes == 2 * 8 * stage.updated_parameters
    assert in_float32.pinned_copy_bytes == pytest.approx(2 * 4 * stage.updated_parameters)


def test_a_run_that_a_node_s_host_memory_cannot_hold_does_not_fit() -> None:
    plan = two_gpus("train.offload=optimizer", "rollout.gpu_memory_fraction=0.3")
    assert plan.problems == []
    small = plan.run.hardware.model_copy(update={"host_memory_bytes": 90e9})
    (problem,) = planned(replace(plan.run, hardware=small)).problems
    assert problem.startswith("train.offload=optimizer: with the copy of a checkpoint a node needs")
    without = replace(plan.run, hardware=small).with_offload("gradients")
    assert planned(without).problems == []


def test_a_sleeping_trainer_keeps_its_reference_in_host_memory() -> None:
    keys = ["method.name=grpo", "method.beta=0.04", *TP2]
    awake, asleep = (
        planned(make_run(SMALL, 2, *keys, f"train.offload={level}", gpu="b200"))
        for level in ("none", "gradients")
    )
    (stage,) = awake.run.stages
    assert awake.worst.terms["reference_model"] == stage.weight_bytes
    assert awake.reference_host_bytes == 0 == asleep.worst.terms["reference_model"]
    assert asleep.reference_host_bytes == 2 * stage.weight_bytes


def test_figures_in_the_documentation_are_a_plan_s() -> None:
    """Gigabytes of the worst rank, and the seconds of the copies."""
    text = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    paper = ROOT / "examples/configs/r1_distill_7b_paper.yaml"
    tp8 = ["parallel.tp=8", "parallel.sequence_parallel=true", "train.recompute=selective"]
    runs = {
        "7B paper preset, 8 GPUs": make_planned_run(
            load_config(paper, []), load_hardware("h100"), 8
        ),
        "7B, 2 GPUs, tp 2, full recomputation": two_gpus().run,
        "32B, 8 GPUs, tp 8, 4,608 tokens, deep sleep": make_run(
            THIRTY_TWO, 8, *tp8, *SPARING, "rollout.tp=4"
        ),
    }
    for name, run in runs.items():
        found: dict[str, list[str]] = {"rollout": [], "train": [], "sync": []}
        for level in OFFLOAD_LEVELS:
            memory = planned(run.with_offload(level)).memory
            for phase, values in found.items():
                values.append(f"{max(rank.phases[phase] for rank in memory) / 1e9:.0f}")
        (training,) = {*found["train"]}
        awake, *others = found["sync"]
        (less,) = {*others}
        row = f"| {name} | {', '.join(found['rollout'])} | {training} | {awake}, {less} |"
        assert row in text
    seconds = two_gpus("train.offload=optimizer").step["offload"]
    assert f"(7B on two GPUs, `optimizer`: {seconds:.1f} s)" in text


def test_on_a_cpu_copies_take_what_they_free() -> None:
    none, all_of_it = (
        planned(make_run(SEVEN, 2, *TP2, f"train.offload={level}", gpu="cpu")).worst
        for level in ("none", "all")
    )
    assert "offload_copies" not in none.terms
    copies = all_of_it.terms["offload_copies"]
    assert copies == none.terms["optimizer"] + none.terms["weights"]
    gradients = none.terms["gradients"]
    assert all_of_it.phases["rollout"] == none.phases["rollout"] - gradients
    assert all_of_it.phases["sync"] == pytest.approx(none.phases["sync"] - gradients + copies)


def test_the_verdict_names_the_least_level_that_fits() -> None:
    for keys, level in (
        (["rollout.gpu_memory_fraction=0.25"], "gradients"),
        ([], "optimizer"),
    ):
        plan = two_gpus(*keys)
        assert plan.fitting_offload == level == plan.as_json()["fitting_offload"]
        assert verdict_line(plan).startswith("DOES NOT FIT. rollout: stage 0 needs")
        assert f"; it fits with train.offload={level} (" in verdict_line(plan)
        fits = two_gpus(*keys, f"train.offload={level}")
        assert fits.fitting_offload is None and verdict_line(fits).startswith("FITS, with")
    hopeless = planned(make_run(LARGE, 8, "parallel.tp=8", "rollout.tp=8"))
    assert hopeless.problems and hopeless.fitting_offload is None
    assert "train.offload" not in verdict_line(hopeless)


@pytest.mark.parametrize(
    ("name", "gpus", "keys", "level", "safe"),
    [
        (SEVEN, 2, [], "gradients", True),
        (THIRTY_TWO, 8, [], "optimizer", False),
        (THIRTY_TWO, 8, SPARING, "optimizer", True),
        (SEVEN, 32, [], "none", True),
    ],
)
def test_a_search_finds_the_least_level_that_fits(
    name: str, gpus: int, keys: list[str], level: str, safe: bool
) -> None:
    """7B on two H100, and 32B on one node: no layout of them fits a trainer that never sleeps."""
    run = make_run(name, gpus, *keys)
    best, *others = search_layouts(run, num_steps=100)
    assert best.run.train.offload == level and best.problems == [] and best.is_safe == safe
    assert (f"train.offload={level}" in best.overrides) == (level != "none")
    fitting = [plan for plan in [best, *others] if not plan.problems]
    assert (level == "none") == any(plan.run.train.offload == "none" for plan in fitting)
    less = OFFLOAD_LEVELS[: OFFLOAD_LEVELS.index(level)]
    for weaker in less:
        assert planned(best.run.with_offload(weaker)).problems  # type: ignore[arg-type]


def test_auto_is_the_least_that_fits_and_is_said() -> None:
    auto = make_run(SEVEN, 2, *TP2, "train.offload=auto")
    plan = least_offload.make_plan(auto, 1)
    assert plan.run.train.offload == "optimizer" == two_gpus().fitting_offload
    assert "offload optimizer; " in show_plan(plan)
    eight = make_run(SEVEN, 8, *TP2, "train.offload=auto")
    assert least_offload.make_plan(eight, 1).run.train.offload == "none"
    one = make_run(THIRTY_TWO, 1, "train.offload=auto")
    hopeless = least_offload.make_plan(one, 1)
    assert hopeless.problems and hopeless.run.train.offload == "all"
    on_cpu = replace(auto, hardware=load_hardware("cpu"))
    assert least_offload.make_plan(on_cpu, 1).run.train.offload == "none"


def test_a_run_chooses_by_the_memory_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = make_run(SEVEN, 2, *TP2, "train.offload=auto")
    checked = make_checked_run(auto.config, auto.shape, 2)
    for gigabytes, level in ((None, "none"), (300, "none"), (85, "optimizer"), (40, "all")):
        memory = None if gigabytes is None else gigabytes * 10**9
        monkeypatch.setattr(runtime_device, "gpu_memory_bytes", lambda device, has=memory: has)
        monkeypatch.setattr(os, "sysconf", lambda name: 2**20)  # a tebibyte of host memory
        chosen = least_offload.with_least_offload(checked)
        assert chosen.config.train.offload == level
    fixed = make_checked_run(auto.with_offload("gradients").config, auto.shape, 2)
    assert least_offload.with_least_offload(fixed) is fixed
