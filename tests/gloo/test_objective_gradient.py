"""The whole gradient of objectives with an old policy and a reference model, every parameter under
its HF name, against plain Hugging Face autograd of the formula.
"""

from dataclasses import replace

import pytest
from forked_cli import ROOT
from hf_objective import Expected, compare
from jobs import Case
from objective_jobs import objective_gradient
from world import World

from megatron_opsft.config.load import load_config
from megatron_opsft.methods.objective import Objective, SequenceClip, SquaredLogRatio, TokenClip

GRPO = Objective(surrogate=TokenClip(low=0.1, high=0.15), beta=0.2)
BASE = Case(objective=GRPO, aggregation="sequence")


def check(world: World, case: Case, updates: int = 2) -> Expected:
    """Compare loss, gradient and statistics of the last of `updates` on a batch."""
    return compare(case, world.run(objective_gradient, case.world_size, case, updates)[0])


LAYOUTS = [
    replace(BASE, tp=2),
    replace(BASE, model="qwen2_tied", tp=2, pp=2, sequence_parallel=True),
    replace(BASE, model="qwen3", tp=2, dp=2, sequence_parallel=True),
    replace(BASE, model="qwen2_tied", pp=2, dp=2, vpp=2),
    replace(BASE, tp=2, cp=2, sequence_parallel=True),
    replace(BASE, tp=2, cross_entropy="te"),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_second_update_s_gradient_matches_hf_in_layout(world: World, case: Case) -> None:
    expected = check(world, case)
    assert min(expected.too_low, expected.too_high) > 20  # the clip is at work on both sides
    assert expected.too_low + expected.too_high < expected.num_tokens / 2


@pytest.mark.parametrize("budget", [1, 10_000])
def test_second_update_s_gradient_matches_hf_for_any_packing(world: World, budget: int) -> None:
    check(world, replace(BASE, dp=2, budget=budget))


def test_first_update_s_gradient_matches_hf(world: World) -> None:
    expected = check(world, replace(BASE, tp=2), updates=1)
    assert expected.too_low == expected.too_high == 0


CASES = [
    replace(BASE, objective=objective, **layout)
    for objective, layout in (
        (Objective(surrogate=TokenClip(low=0.1, high=0.15)), {"dp": 2}),
        (
            Objective(surrogate=TokenClip(low=0.1, high=0.15, dual=1.3), temperature=0.6),
            {"dp": 2},
        ),
        (Objective(surrogate=TokenClip(), beta=0.2, temperature=1.5), {"dp": 2}),
        (Objective(surrogate=SequenceClip(low=0.02, high=0.02)), {"cp": 2}),
        (Objective(surrogate=SquaredLogRatio(tau=0.1)), {"cp": 4}),
        (Objective(beta=0.2, kl="k1"), {"dp": 2}),
        (Objective(beta=0.2, kl="k2"), {"dp": 2}),
    )
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.objective))
def test_gradient_matches_hf_for_objective(world: World, case: Case) -> None:
    check(world, case)


def objectives_of_presets() -> dict[tuple[Objective, int], str]:
    """With the number of updates, up to 2, and the presets that have them; of methods that sample.
    Plain likelihood, which is what most are in a batch's only update, is `test_gradient.py`'s; a
    teacher's divergence `test_distillation.py`'s.
    """
    found: dict[tuple[Objective, int], list[str]] = {}
    for path in sorted((ROOT / "examples/configs/methods").glob("*.yaml")):
        config = load_config(path)
        method, temperature = config.method, config.rollout.temperature
        objective = method.objective(temperature)
        if not (method.has_fixed_data or objective.is_weighted_likelihood or objective.has_teacher):
            found.setdefault((objective, min(method.num_updates, 2)), []).append(path.stem)
    return {kind: "+".join(names) for kind, names in found.items()}


OF_PRESETS = objectives_of_presets()


@pytest.mark.parametrize(("objective", "updates"), OF_PRESETS, ids=OF_PRESETS.values())
def test_gradient_matches_hf_for_the_presets_of_every_method(
    world: World, objective: Objective, updates: int
) -> None:
    check(world, replace(BASE, dp=2, objective=objective), updates)
