"""The search for a layout: what it proposes is accepted, fits, and is the fastest of all tried."""

import re

import pytest
from forked_cli import ROOT
from plan_cases import make_job, make_responses
from real_shapes import REAL_SHAPES

from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.plan.checks import check_job
from megatron_opsft.plan.estimate import SAFE_SHARE, estimate_run
from megatron_opsft.plan.hardware import load_hardware
from megatron_opsft.plan.job import make_job as read_job
from megatron_opsft.plan.search import FoundLayout, search_layouts
from megatron_opsft.plan.workload import make_workload


def search(model: str, world_size: int, *overrides: str, gpu: str = "h100") -> list[FoundLayout]:
    job = make_job(REAL_SHAPES[model], world_size, *overrides, gpu=gpu)
    return search_layouts(job, make_responses(job), 10)


def test_the_best_layout_has_most_memory_of_the_fastest_and_its_overrides_make_it() -> None:
    model, base = "DeepSeek-R1-Distill-Qwen-7B", ("rollout.gpu_memory_fraction=0.6",)
    found = search(model, 16, *base)
    best = found[0]
    safe = [one for one in found if one.estimate.is_safe]
    fastest = min(o.estimate.step.total for o in safe)
    near = [o for o in safe if o.estimate.step.total <= 1.01 * fastest]
    assert best in near and len(near) < len(safe)
    assert best.estimate.worst.margin >= max(o.estimate.worst.margin for o in near) - 1e9
    assert best.estimate.worst.margin >= SAFE_SHARE * 84.9e9
    # As a user would take it over.
    job = make_job(REAL_SHAPES[model], 16, *base, *best.overrides)
    check_job(job)
    again = estimate_run(job, make_responses(job), 10)
    assert again.step == best.estimate.step
    assert again.worst.margin == best.estimate.worst.margin


def test_every_layout_is_tried_once() -> None:
    found = search("DeepSeek-R1-Distill-Qwen-1.5B", 8)
    layouts = [one.overrides for one in found]
    assert len(set(layouts)) == len(layouts)
    # tp 1, 2 x pp 1, 2, 4 (28 layers, 8 ranks) x three recomputations x rollout.tp 1, 2, 4.
    assert len(found) == (3 + 3) * 3 * 3


def test_context_parallelism_is_tried_for_sequences_beyond_the_packing_budget() -> None:
    long = ("rollout.max_response_tokens=32768", "train.max_tokens_per_microbatch=9000")
    found = search("DeepSeek-R1-Distill-Qwen-1.5B", 8, *long)
    tried = {one.estimate.job.parallel.cp for one in found}
    assert tried == {1, 2, 4}  # a quarter of the longest fits the budget
    for one in found:
        parallel = one.estimate.job.parallel
        assert (f"parallel.cp={parallel.cp}" in one.overrides) == (parallel.cp > 1)
    # Without tensor and pipeline parallelism.
    simplest = [o for o in found if o.estimate.job.parallel.replica_size == _cp(o)]
    margins = [
        max(_train_margin(one) for one in simplest if _cp(one) == cp) for cp in sorted(tried)
    ]
    assert margins[0] < margins[1] < margins[2]


def test_expert_parallelism_is_tried_for_a_mixture_and_makes_room() -> None:
    found = search("Qwen3-30B-A3B", 16)
    tried = {(one.estimate.job.parallel.ep, one.estimate.job.parallel.tp) for one in found}
    assert {ep for ep, _ in tried} == {1, 2, 4, 8}
    for one in found:
        parallel = one.estimate.job.parallel
        assert parallel.expert_tp == (parallel.tp if parallel.ep == 1 else 1)
        job = make_job(REAL_SHAPES["Qwen3-30B-A3B"], 16, *one.overrides)
        assert job.parallel == parallel
    # On ranks with everything else alike, the weights of experts are shared out.
    weights = {
        job.parallel.ep: one.estimate.memory[0].stage.weight_bytes
        for one in found
        if (job := one.estimate.job).parallel.tp == job.parallel.pp == 1
    }
    experts = 2 * 48 * 128 * 3 * 2048 * 768
    assert [weights[1] - weights[ep] for ep in (2, 4, 8)] == pytest.approx(
        [experts / 2, experts * 3 / 4, experts * 7 / 8], rel=1e-6
    )
    assert found[0].estimate.is_safe and found[0].estimate.job.parallel.ep > 1


def _cp(found: FoundLayout) -> int:
    return found.estimate.job.parallel.cp


def _train_margin(found: FoundLayout) -> float:
    return min(rank.limit - rank.phases["train"] for rank in found.estimate.memory)


def test_the_engine_gets_less_where_the_trainer_needs_it() -> None:
    found = search("DeepSeek-R1-Distill-Qwen-32B", 64, "rollout.gpu_memory_fraction=0.9")
    (lowered,) = [o for o in found[0].overrides if o.startswith("rollout.gpu_memory_fraction=")]
    assert 0.3 < float(lowered.split("=")[1]) < 0.9
    assert found[0].estimate.is_safe


def test_what_fits_nowhere_is_said() -> None:
    found = search("Qwen2.5-72B", 8)
    assert found and not any(one.estimate.fits for one in found)


def test_a_search_without_any_accepted_layout_gives_the_reason() -> None:
    with pytest.raises(UserError, match="positions"):
        search("DeepSeek-R1-Distill-Qwen-1.5B", 8, "rollout.max_response_tokens=200000")


def test_the_hugging_face_engine_has_no_layout_of_its_own() -> None:
    config = load_config(None, ["model.path=m", "data.train=arithmetic", "rollout.engine=hf"])
    shape = REAL_SHAPES["DeepSeek-R1-Distill-Qwen-1.5B"]
    job = make_job(shape, 4, "rollout.engine=hf", "rollout.batch_size=8")
    assert config.rollout.tp == 1
    found = search_layouts(job, make_responses(job), 10)
    assert {o for one in found for o in one.overrides if o.startswith("rollout")} == {
        "rollout.tp=1"
    }


def test_the_search_the_docs_and_the_shipped_file_name_the_same_layout() -> None:
    path = ROOT / "examples/configs/r1_distill_7b_paper.yaml"
    config = load_config(path)
    job = read_job(config, load_hardware("h100"), 32)
    found = search_layouts(job, make_workload(config), 10)
    rows = re.findall(
        r"^\| `(parallel.*?)` \| ([\d.]+) \|", (ROOT / "docs/planning.md").read_text(), re.MULTILINE
    )
    defaults = {"parallel.pp=1", "train.recompute=none"}
    assert [(set(words.split()), float(seconds)) for words, seconds in rows] == [
        (set(one.overrides) - defaults, round(one.estimate.step.total, 1))
        for one in found[: len(rows)]
    ]
    best = load_config(path, found[0].overrides)
    assert best == config
