"""The search for a layout: what it proposes is accepted, fits, and is the fastest of all tried."""

import re

import pytest
from forked_cli import ROOT
from plan_cases import LARGE, MIXTURE, SMALL, make_run, planned

from megatron_opsft.commands.plan.assumptions import load_hardware
from megatron_opsft.commands.plan.estimate import SAFE_SHARE, Plan
from megatron_opsft.commands.plan.job import check_planned_run, make_planned_run
from megatron_opsft.commands.plan.search import search_layouts, what_would_fit
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError

MIDDLE = "DeepSeek-R1-Distill-Qwen-7B"


def search(model: str, world_size: int, *overrides: str) -> list[Plan]:
    return search_layouts(make_run(model, world_size, *overrides), 10)


def test_the_best_is_the_simplest_of_the_fastest_and_its_overrides_make_it() -> None:
    """Faster ones leave less room, and those that leave more need more measures."""
    plain = {f"{key}=1" for key in ("parallel.tp", "parallel.pp", "rollout.tp")}
    plain |= {"train.recompute=none", "parallel.sequence_parallel=true"}
    base = "rollout.gpu_memory_fraction=0.6"
    found = search(MIDDLE, 16, base)
    safe = [one for one in found if one.is_safe]
    fastest = min(one.step["total"] for one in safe)
    near = [one for one in safe if one.step["total"] <= 1.05 * fastest]
    assert len(near) < len(safe) and found[: len(near)] == near
    roomy = [one for one in near if one.worst.margin >= 2 * SAFE_SHARE * 84.9e9]
    assert len(roomy) < len(near) and near[: len(roomy)] == roomy
    measures = [
        len({*one.overrides} - plain) + ("train.recompute=full" in one.overrides) for one in roomy
    ]
    assert measures == sorted(measures) and measures[0] < measures[1]
    best = found[0]
    assert fastest < best.step["total"]
    assert best.worst.margin < max(one.worst.margin for one in near)
    # As a user would take it over.
    run = make_run(MIDDLE, 16, base, *best.overrides)
    check_planned_run(run)
    assert (planned(run).step, planned(run).worst) == (best.step, best.worst)


def test_every_layout_is_tried_once() -> None:
    found = search(SMALL, 8)
    layouts = [one.overrides for one in found]
    assert len(set(layouts)) == len(layouts)
    # tp 1, 2 x pp 1, 2, 4 (28 layers, 8 ranks) x three recomputations x rollout.tp 1, 2, 4.
    assert len(found) == (3 + 3) * 3 * 3


def test_tensor_parallelism_is_tried_up_to_a_whole_node() -> None:
    tried = {one.run.parallel.tp for one in search(LARGE, 8, "train.recompute=full")}
    assert tried == {1, 2, 4, 8}


def test_context_parallelism_is_tried_for_sequences_beyond_the_packing_budget() -> None:
    long = ("rollout.max_response_tokens=32768", "train.max_tokens_per_microbatch=9000")
    tried = {one.run.parallel.cp for one in search(SMALL, 8, *long)}
    assert tried == {1, 2, 4}  # a quarter of the longest fits the budget


def test_expert_parallelism_is_tried_for_a_mixture_and_makes_room() -> None:
    found = search(MIXTURE, 16)
    assert {one.run.parallel.ep for one in found} == {1, 2, 4, 8}
    for one in found:
        assert make_run(MIXTURE, 16, *one.overrides).parallel == one.run.parallel
    assert found[0].is_safe and found[0].run.parallel.ep > 1


def test_the_engine_gets_less_where_the_trainer_needs_it() -> None:
    found = search("DeepSeek-R1-Distill-Qwen-32B", 64, "rollout.gpu_memory_fraction=0.9")
    (lowered,) = [o for o in found[0].overrides if o.startswith("rollout.gpu_memory_fraction=")]
    assert 0.3 < float(lowered.split("=")[1]) < 0.9
    assert found[0].is_safe


def test_what_fits_nowhere_and_what_no_layout_accepts_is_said() -> None:
    found = search(LARGE, 8)
    assert found and all(one.problems for one in found)
    with pytest.raises(UserError, match="positions"):
        search(SMALL, 8, "rollout.max_response_tokens=200000")


LONG_PACKS = ("train.max_tokens_per_microbatch=800000", "rollout.max_response_tokens=2000")


@pytest.mark.parametrize(
    ("model", "keys", "helps"),
    [
        (LARGE, (), ["--nodes 4", "lora.rank=32"]),
        (MIDDLE, LONG_PACKS, ["train.max_tokens_per_microbatch=3024", "--nodes 4"]),
    ],
)
def test_what_would_fit_is_the_least_and_a_search_with_it_finds_a_layout(
    model: str, keys: tuple[str, ...], helps: list[str]
) -> None:
    """Half as many nodes as are named do not do."""
    assert not search(model, 8, *keys)[0].is_safe
    assert what_would_fit(make_run(model, 8, *keys), 10) == helps
    for change in helps:
        if change.startswith("--nodes "):
            num_nodes = int(change.split()[1])
            assert search(model, 8 * num_nodes, *keys)[0].is_safe
            assert not search(model, 4 * num_nodes, *keys)[0].is_safe
        else:
            assert search(model, 8, *keys, change)[0].is_safe


def test_the_search_the_docs_and_the_shipped_file_name_the_same_layout() -> None:
    path = ROOT / "examples/configs/r1_distill_7b_paper.yaml"
    config = load_config(path)
    run = make_planned_run(config, load_hardware("h100"), 32)
    found = search_layouts(run, 10)
    rows = re.findall(
        r"^\| `(parallel.*?)` \| ([\d.]+) \|", (ROOT / "docs/planning.md").read_text(), re.MULTILINE
    )
    defaults = {"parallel.pp=1", "train.recompute=none"}
    assert [(set(words.split()), float(seconds)) for words, seconds in rows] == [
        (set(one.overrides) - defaults, round(one.step["total"], 1)) for one in found[: len(rows)]
    ]
    best = load_config(path, found[0].overrides)
    assert best == config
