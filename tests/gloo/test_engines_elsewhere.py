"""Engines on other nodes: weights straight to them, in place, as deltas; a node that is lost."""

import json
from collections.abc import Iterator
from pathlib import Path

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
        assert [(path, share, wrong) for path, _, share, wrong in pushes] == [
            ("in_place", None, [])
        ] * 2
        (num_bytes,) = {sent for _, sent, _, _ in pushes}
        assert num_bytes == 2 * 4 * 668_288  # each engine gets every parameter once, in float32


def test_a_lost_node_changes_nothing(session: KeptSession) -> None:
    expected = session.run(undisturbed)[0]
    assert len(expected) == 3
    assert session.run(with_a_lost_node, timeout=200)[0] == expected


def test_deltas_bring_the_same_bits(world: World, tmp_path: Path) -> None:
    with engine_hosts(tmp_path, 2) as elsewhere:
        overrides = [*HF, *elsewhere, "model.dtype=bfloat16", "sync.delta=true"]
        kept = KeptSession(world, tmp_path / "run", 2, [*overrides, "optimizer.lr=1e-6"])
        for pushes in kept.run(push_steps, 4):
            assert [path for path, *_ in pushes] == ["in_place"] * 4
            assert [wrong for *_, wrong in pushes] == [[]] * 4
            whole, *deltas = pushes
            assert whole[1:3] == (2 * 2 * 668_288, None)  # the first in place
            for _, sent, share, _ in deltas:
                assert share is not None and 0 < share < 0.2
                assert sent == round(share * 2 * 668_288) * 6  # position and value
        last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
        sent, share = last["sync_bytes_sent"], last["sync_share_changed"]
        assert sent == round(share * 2 * 668_288) * 6
        world.leave()
