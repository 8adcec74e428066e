"""Routing replay: every token goes to the experts that it is told, in every layout."""

from dataclasses import replace

import pytest
from jobs import Case, gradient
from world import World

FORCED = Case(model="qwen3_moe", replays=True)


@pytest.mark.parametrize(
    "case",
    [
        replace(FORCED, tp=2, pp=2, sequence_parallel=True, recompute="selective"),
        replace(FORCED, pp=2, vpp=2, dp=2, ep=2, recompute="full"),
        replace(FORCED, cp=2, dp=2, ep=2),
        replace(FORCED, dp=4, ep=4, num_samples=3),  # one rank packs only padding
        replace(FORCED, model="qwen3_moe_unnormalized", tp=2, dp=2, sequence_parallel=True),
    ],
    ids=str,
)
def test_the_gradient_of_a_given_routing_is_the_same_in_every_layout(
    world: World, case: Case
) -> None:
    alone = replace(FORCED, model=case.model, num_samples=case.num_samples)
    loss, _, found = world.run(gradient, case.world_size, case)[0]
    expected_loss, _, expected = world.run(gradient, 1, alone)[0]
    own_loss = world.run(gradient, 1, replace(alone, replays=False))[0][0]
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert own_loss != pytest.approx(loss, rel=1e-4)  # the routers would have chosen others
    for name, want in expected.items():
        error = abs(found[name] - want).max() / abs(want).max()
        assert error < 1e-5, f"{name}: {error:.2e}"
