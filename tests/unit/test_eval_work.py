"""The work of an evaluation: what is missing, seeded, the longest first; engines take each response
once.
"""

from collections.abc import Sequence

import torch.distributed as dist
from rows import problem_set

from megatron_opsft.evaluate.benchmarks import Benchmark
from megatron_opsft.evaluate.work import WorkQueue, missing_requests
from megatron_opsft.records import Problem
from megatron_opsft.rollout.engine import EngineShare
from megatron_opsft.rollout.requests import ResponseRequest, make_requests
from megatron_opsft.rollout.sampling import response_seed
from megatron_opsft.runtime.job import Job

GROUP = 8


def benchmark(name: str, num_problems: int, samples: int) -> Benchmark:
    problems = tuple(Problem(id=f"p{i}", text=str(i), answer="1") for i in range(num_problems))
    data = problem_set(name, problems)
    return Benchmark(name=name, data=data, problems=problems, samples=samples)


def pairs(requests: Sequence[ResponseRequest]) -> list[tuple[str, int]]:
    return [(request.problem_id, request.sample_index) for request in requests]


def test_requests_are_what_is_missing_seeded_by_benchmark_problem_and_index() -> None:
    benchmarks = [benchmark("a", 3, 5), benchmark("b", 2, 20)]
    prompts = {b.key(p.id): (1, 2, int(p.text) + 3) for b in benchmarks for p in b.problems}
    done = {("a/p0", i) for i in range(5)} | {("a/p1", 2), ("b/p1", 19)}
    requests = missing_requests(benchmarks, prompts, done, seed=7)
    every = {(b.key(p.id), i) for b in benchmarks for p in b.problems for i in range(b.samples)}
    assert sorted(pairs(requests)) == sorted(every - done)
    assert requests[0].problem_id.startswith("b/")
    for request in requests:
        assert request.seed == response_seed(7, 0, request.problem_id, request.sample_index)
    # The same problem id in two benchmarks is two problems.
    assert len({request.seed for request in requests}) == len(requests)


def queues_of(num_problems: int, engines: int, tp: int = 1) -> list[WorkQueue]:
    """Of every rank."""
    store = dist.PrefixStore("job", dist.HashStore())
    some = [r for n in range(num_problems) for r in make_requests(f"p{n}", (1, n), GROUP, 0, 1)]
    return [
        WorkQueue(
            "q",
            some,
            Job(rank=rank, world_size=engines * tp, id="", store=store),
            EngineShare(index=rank // tp, count=engines, num_ranks=tp, answers=rank % tp == 0),
        )
        for rank in range(engines * tp)
    ]


def test_every_response_is_taken_once_never_more_than_there_is_room_and_the_fast_take_more() -> (
    None
):
    queues = queues_of(60, 3)
    taken: list[list[tuple[str, int]]] = [[] for _ in queues]
    for turn in range(600):
        engine, room = (0, 0, 0, 1, 1, 2)[turn % 6], 1 + turn * 7 % 20
        got = pairs(queues[engine].take(room))
        assert len(got) <= room
        taken[engine] += got
    every = [(f"p{n}", i) for n in range(60) for i in range(GROUP)]
    assert sorted(sum(taken, [])) == sorted(every)
    assert len(taken[0]) > 160 > len(taken[2])


def test_no_engine_is_idle_at_the_start_however_much_room_the_first_has() -> None:
    queues = queues_of(2, 3)
    assert [len(queue.take(100)) for queue in queues * 2] == [6, 6, 4, 0, 0, 0]


def test_tensor_parallel_ranks_get_the_same_work() -> None:
    queues = queues_of(10, 2, 2)
    total = 0
    for _ in range(20):
        taken = [pairs(queue.take(12)) for queue in queues]
        assert taken[0] == taken[1] and taken[2] == taken[3]
        total += len(taken[0]) + len(taken[2])
    assert total == 10 * GROUP
