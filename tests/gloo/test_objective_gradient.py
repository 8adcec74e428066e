"""The whole gradient of objectives with an old policy and a reference model, every parameter under
its HF name, against plain Hugging Face autograd of the formula.
"""

from dataclasses import replace
from typing import Any

import pytest
from forked_cli import ROOT
from hf_objective import Expected, compare
from jobs import Case
from objective_jobs import objective_gradient
from tiers import for_release
from world import World

from megatron_opsft.config.load import load_config
from megatron_opsft.methods.objective import (
    Objective,
    SequenceClip,
    SquaredLogRatio,
    TokenClip,
    TokenPenalty,
)

CLIP = TokenClip(low=0.1, high=0.15)
GRPO = Objective(surrogate=CLIP, beta=0.2)
TIED = "qwen2_tied"


def check(world: World, objective: Objective = GRPO, updates: int = 2, **keys: Any) -> Expected:
    """Compare loss, gradient and statistics of the last of `updates` on a batch; keys: of the
    case.
    """
    case = Case(objective=objective, aggregation="sequence", **keys)
    return compare(case, world.run(objective_gradient, case.world_size, case, updates)[0])


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "pp": 2, "sequence_parallel": True, "model": TIED},
    {"pp": 2, "dp": 2, "vpp": 2, "model": TIED},
    {"tp": 2, "cp": 2, "sequence_parallel": True},
    {"tp": 2, "cross_entropy": "te"},
    {"dp": 2, "budget": 1},
]
COMBINED: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "dp": 2, "sequence_parallel": True, "model": "qwen3"},
    {"dp": 2, "budget": 10_000},
]


@pytest.mark.parametrize("keys", [*LAYOUTS, *for_release(COMBINED)], ids=str)
def test_second_update_s_gradient_matches_hf_in_layouts_and_packs(
    world: World, keys: dict[str, Any]
) -> None:
    expected = check(world, **keys)
    assert min(expected.too_low, expected.too_high) > 20  # the clip is at work on both sides
    assert expected.too_low + expected.too_high < expected.num_tokens / 2


@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        (Objective(surrogate=CLIP), {"dp": 2}),
        (Objective(surrogate=replace(CLIP, dual=1.3), temperature=0.6), {"dp": 2}),
        (Objective(surrogate=TokenClip(), beta=0.2, temperature=1.5), {"dp": 2}),
        (Objective(surrogate=SequenceClip(low=0.02, high=0.02)), {"cp": 2}),
        (Objective(surrogate=SquaredLogRatio(tau=0.1)), {"cp": 4}),
        (Objective(beta=0.2, kl="k1"), {"dp": 2}),
        (Objective(beta=0.2, kl="k2"), {"dp": 2}),
        (Objective(token_penalty=TokenPenalty(beta=0.3, whitens=False), kl="k1"), {"dp": 2}),
    ],
    ids=str,
)
def test_gradient_matches_hf_for_objective(
    world: World, objective: Objective, layout: dict[str, int]
) -> None:
    check(world, objective, **layout)


@pytest.mark.parametrize("layout", [{"tp": 2, "pp": 2}, {"dp": 2, "cp": 2}], ids=str)
def test_gradient_with_a_divergence_in_each_token_s_advantage_matches_hf(
    world: World, layout: dict[str, int]
) -> None:
    """Whitened over the tokens of all ranks together."""
    penalty = TokenPenalty(beta=0.3, whitens=True)
    objective = Objective(surrogate=CLIP, token_penalty=penalty, kl="k1")
    expected = check(world, objective, model=TIED, **layout)
    assert min(expected.too_low, expected.too_high) > 5


def objectives_of_presets() -> dict[tuple[Objective, int], str]:
    """With the number of updates, up to 2, and the presets that have them; of methods that sample.
    Plain likelihood, which is what most are in a batch's only update, is `test_gradient.py`'s; a
    teacher's divergence `test_distilled_gradient.py`'s.
    """
    found: dict[tuple[Objective, int], str] = {}
    for path in sorted((ROOT / "examples/configs/methods").glob("*.yaml")):
        config = load_config(path)
        method = config.method
        objective = method.objective(config.rollout.temperature)
        if not (method.has_fixed_data or objective.is_weighted_likelihood or objective.has_teacher):
            kind = (objective, min(method.num_updates, 2))
            found[kind] = f"{found[kind]}+{path.stem}" if kind in found else path.stem
    return found


OF_PRESETS = objectives_of_presets()


@pytest.mark.parametrize(("objective", "updates"), OF_PRESETS, ids=OF_PRESETS.values())
def test_gradient_matches_hf_for_the_presets_of_every_method(
    world: World, objective: Objective, updates: int
) -> None:
    check(world, objective, updates, dp=2)
