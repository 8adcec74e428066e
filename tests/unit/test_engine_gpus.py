"""Which GPUs separate engines take, and what is said where there are too few."""

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.rollout.remote.gpus import (
    NodeRank,
    check_engine_gpus,
    engine_gpus,
    engines_of,
)


def ranks(world_size: int, local_world_size: int) -> list[NodeRank]:
    return [
        NodeRank(
            rank=rank,
            world_size=world_size,
            local_rank=rank % local_world_size,
            local_world_size=local_world_size,
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
@pytest.mark.parametrize("local_world_size", [1, 4, 6])
@pytest.mark.parametrize("num_engines", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("tp", [1, 2])
def test_engines_of_a_node_share_its_gpus_with_no_rank_and_no_other_engine(
    num_nodes: int, local_world_size: int, num_engines: int, tp: int
) -> None:
    world_size = num_nodes * local_world_size
    nodes = ranks(world_size, local_world_size)
    of_rank = [engines_of(rank, world_size, num_engines) for rank in range(world_size)]
    assert [engine for engines in of_rank for engine in engines] == list(range(num_engines))
    assert max(map(len, of_rank)) - min(map(len, of_rank)) <= 1 and len(of_rank[0]) > 0
    for node in range(num_nodes):
        own = [r for r in nodes if r.rank // local_world_size == node]
        taken = [
            gpu
            for rank in own
            for engine in of_rank[rank.rank]
            for gpu in engine_gpus(rank, num_engines, tp, engine)
        ]
        first = local_world_size
        assert taken == list(range(first, first + tp * sum(len(of_rank[r.rank]) for r in own)))
        enough = first + len(taken)
        one_of_them = nodes[node * local_world_size]
        check_engine_gpus(one_of_them, num_engines, tp, enough)
        if taken:
            with pytest.raises(UserError):
                check_engine_gpus(one_of_them, num_engines, tp, enough - 1)


def test_as_the_shipped_scripts_start_it_the_fix_is_named() -> None:
    with pytest.raises(UserError) as error:
        check_engine_gpus(ranks(8, 8)[3], 2, 1, 8)
    assert str(error.value) == (
        "rollout.placement=separate: 8 training ranks on this node and 2 engines of rollout.tp=1 "
        "need 10 GPUs, and torch sees 8; start fewer ranks on each node (torchrun "
        "--nproc-per-node, sbatch --ntasks-per-node), or lower rollout.num_engines or rollout.tp"
    )


def test_place_is_the_launcher_s(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": 9,
        "WORLD_SIZE": 12,
        "LOCAL_RANK": 3,
        "LOCAL_WORLD_SIZE": 6,
    }.items():
        monkeypatch.setenv(name, str(value))
    node = NodeRank.of_this_process()
    assert list(node.neighbours()) == [6, 7, 8, 9, 10, 11]
