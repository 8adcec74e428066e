"""Work that engines take from their own part and from each other's: each response once."""

import threading
import time
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from megatron_opsft.rollout.dealing import WorkQueue, deal_evenly
from megatron_opsft.rollout.engine import Replica
from megatron_opsft.rollout.requests import PromptRequest, make_request
from megatron_opsft.runtime.job import Job

GROUP = 8


def requests(num_problems: int) -> list[PromptRequest]:
    return [make_request(f"p{n}", (1, n), GROUP, 0, 1) for n in range(num_problems)]


def pairs(found: Sequence[PromptRequest]) -> list[tuple[str, int]]:
    return [(r.problem_id, index) for r in found for index in r.sample_indices]


def job_of(rank: int, world_size: int, store: dist.Store) -> Job:
    return Job(rank=rank, world_size=world_size, id="job", store=dist.PrefixStore("job", store))


def queues(num_problems: int, num_engines: int) -> list[WorkQueue]:
    """Of ranks with an engine each, over one store."""
    parts, store = deal_evenly(requests(num_problems), num_engines), dist.HashStore()
    return [
        WorkQueue("q", parts, job_of(n, num_engines, store), Replica(number=n, count=num_engines))
        for n in range(num_engines)
    ]


def test_parts_are_equal_and_cut_groups_only_where_two_meet() -> None:
    parts = deal_evenly(requests(7), 3)
    assert [len(part) for part in parts] == [19, 19, 18]
    assert sorted(pair for part in parts for pair in pairs(part)) == sorted(pairs(requests(7)))
    # Of their own turn, as prompts come by length: no part has all the long ones.
    assert [r.problem_id for r in parts[0][::GROUP]] == ["p0", "p3", "p6"]
    for part in parts:
        ids = [r.problem_id for r in part]
        assert len(set(ids)) <= sum(a != b for a, b in zip(ids, ids[1:], strict=False)) + 1


@pytest.mark.parametrize("num_engines", [1, 3, 40])
def test_every_response_is_taken_once_and_never_more_than_there_is_room(num_engines: int) -> None:
    """40 engines: more than are looked at together."""
    taken: list[list[tuple[str, int]]] = [[] for _ in range(num_engines)]
    of_engine = queues(60, num_engines)

    def work(engine: int) -> None:
        for number in range(10_000):
            room = 1 + (number * 7 + engine) % 20
            got = pairs(of_engine[engine].take(room))
            assert len(got) <= room
            if not got:
                return
            taken[engine] += got
            time.sleep(0.0005 * len(got) * (1 + 3 * (engine % 3)))  # every third one is fast

    threads = [threading.Thread(target=work, args=(engine,)) for engine in range(num_engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [pair for part in taken for pair in part]
    assert sorted(everything) == sorted(pairs(requests(60)))
    if num_engines == 3:
        assert len(taken[0]) > 160 > len(taken[2])


def test_an_idle_engine_takes_half_of_what_another_has_not_begun_in_whole_groups() -> None:
    first, second = queues(8, 2)
    second_own = pairs(second.take(32))
    assert len(second_own) == 32 and not set(second_own) & set(pairs(first.take(8)))
    stolen = second.take(100)  # 24 are left of the first part
    assert [len(r.seeds) for r in stolen] == [GROUP]  # half are 12: one whole group
    assert len(pairs(second.take(100))) == GROUP
    assert len(pairs(second.take(100))) == GROUP // 2  # of one group: siblings are split
    assert len(pairs(first.take(100))) == GROUP // 2
    assert first.take(100) == second.take(100) == []


def test_tensor_parallel_ranks_get_the_same_work() -> None:
    parts, store = deal_evenly(requests(10), 2), dist.HashStore()

    def queue(rank: int) -> WorkQueue:
        replica = Replica(number=rank // 2, count=2, num_ranks=2, answers=rank % 2 == 0)
        return WorkQueue("q", parts, job_of(rank, 4, store), replica)

    of_rank = [queue(rank) for rank in range(4)]
    total = 0
    for _ in range(20):
        taken = [q.take(12) for q in of_rank]
        assert taken[0] == taken[1] and taken[2] == taken[3]
        total += len(pairs(taken[0])) + len(pairs(taken[2]))
    assert total == 10 * GROUP
    for q in of_rank:
        q.forget()
    assert store.list_keys() == []
