"""Engines on other nodes: weights straight to them, in place; a node that is lost."""

from collections.abc import Iterator

import pytest
from elsewhere_jobs import engine_hosts, push_steps, undisturbed, with_a_lost_node
from vllm_jobs import KeptSession
from world import World

HF = ["rollout.engine=hf", "rollout.batch_size=8"]


@pytest.fixture(scope="module")
def session(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptSession]:
    """Two ranks, each with an engine elsewhere."""
    directory = tmp_path_factory.mktemp("elsewhere")
    with engine_hosts(directory, 2) as elsewhere:
        overrides = [*HF, *elsewhere, "parallel.tp=2", "optimizer.lr=5e-4"]
        yield KeptSession(world, directory / "run", 2, overrides)
        world.leave()


def test_engines_hold_the_weights_bit_for_bit_after_every_push(session: KeptSession) -> None:
    for pushes in session.run(push_steps, 2):
        assert [(path, wrong) for path, _, wrong in pushes] == [("in_place", [])] * 2
        (num_bytes,) = {sent for _, sent, _ in pushes}
        assert num_bytes == 2 * 4 * 668_288  # each engine gets every parameter once, in float32


def test_a_lost_node_changes_nothing(session: KeptSession) -> None:
    expected = session.run(undisturbed)[0]
    assert len(expected) == 3
    assert session.run(with_a_lost_node, timeout=200)[0] == expected
