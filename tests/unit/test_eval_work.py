"""The work of an evaluation: what is missing, seeded, the longest first; engines take each response
once.
"""

import threading
import time
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from megatron_opsft.data.problems import ProblemSet
from megatron_opsft.evaluate.benchmarks import Benchmark
from megatron_opsft.evaluate.work import WorkQueue, missing_requests
from megatron_opsft.records import Problem
from megatron_opsft.rollout.engine import EngineShare
from megatron_opsft.rollout.requests import ResponseRequest, make_requests
from megatron_opsft.rollout.sampling import response_seed
from megatron_opsft.runtime.job import Job

GROUP = 8


def benchmark(name: str, num_problems: int, samples: int) -> Benchmark:
    problems = tuple(
        Problem(id=f"p{i}", text=f"{name} {i}", answer="1") for i in range(num_problems)
    )
    data = ProblemSet(
        name=name,
        problems=problems,
        rows=tuple(range(1, num_problems + 1)),
        bad_rows=(),
        sources=(name,),
        parts=(0,) * num_problems,
    )
    return Benchmark(name=name, data=data, problems=problems, samples=samples)


def prompts_of(benchmarks: list[Benchmark]) -> dict[str, tuple[int, ...]]:
    return {b.key(p.id): (1, 2, int(p.id[1:]) + 3) for b in benchmarks for p in b.problems}


def pairs(requests: Sequence[ResponseRequest]) -> list[tuple[str, int]]:
    return [(request.problem_id, request.sample_index) for request in requests]


def test_requests_are_what_is_missing_seeded_by_benchmark_problem_and_index() -> None:
    benchmarks = [benchmark("a", 3, 5), benchmark("b", 2, 20)]
    done = {("a/p0", i) for i in range(5)} | {("a/p1", 2), ("b/p1", 19)}
    requests = missing_requests(benchmarks, prompts_of(benchmarks), done, seed=7)
    wanted = {
        (b.key(p.id), i)
        for b in benchmarks
        for p in b.problems
        for i in range(b.samples)
        if (b.key(p.id), i) not in done
    }
    assert sorted(pairs(requests)) == sorted(wanted)
    assert requests[0].problem_id.startswith("b/")
    for request in requests:
        assert request.seed == response_seed(7, 0, request.problem_id, request.sample_index)
    # The same problem id in two benchmarks is two problems.
    assert len({request.seed for request in requests}) == len(wanted)


def some_requests(num_problems: int) -> list[ResponseRequest]:
    return [r for n in range(num_problems) for r in make_requests(f"p{n}", (1, n), GROUP, 0, 1)]


def queue_of(rank: int, store: dist.Store, num_problems: int, engines: int, tp: int) -> WorkQueue:
    job = Job(rank=rank, world_size=engines * tp, id="", store=dist.PrefixStore("job", store))
    share = EngineShare(index=rank // tp, count=engines, num_ranks=tp, answers=rank % tp == 0)
    return WorkQueue("q", some_requests(num_problems), job, share)


@pytest.mark.parametrize("num_engines", [1, 3])
def test_every_response_is_taken_once_and_never_more_than_there_is_room(num_engines: int) -> None:
    taken: list[list[tuple[str, int]]] = [[] for _ in range(num_engines)]
    store = dist.HashStore()

    def work(engine: int) -> None:
        queue = queue_of(engine, store, 60, num_engines, 1)
        for number in range(10_000):
            room = 1 + (number * 7 + engine) % 20
            got = pairs(queue.take(room))
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
    assert sorted(everything) == sorted(pairs(some_requests(60)))
    if num_engines == 3:
        assert len(taken[0]) > 160 > len(taken[2])


def test_no_engine_is_idle_at_the_start_however_much_room_the_first_has() -> None:
    store = dist.HashStore()
    queues = [queue_of(rank, store, 2, 3, 1) for rank in range(3)]
    assert [len(queue.take(100)) for queue in queues] == [6, 6, 4]
    assert [len(queue.take(100)) for queue in queues] == [0, 0, 0]


def test_tensor_parallel_ranks_get_the_same_work() -> None:
    store = dist.HashStore()
    queues = [queue_of(rank, store, 10, 2, 2) for rank in range(4)]
    total = 0
    for _ in range(20):
        taken = [pairs(queue.take(12)) for queue in queues]
        assert taken[0] == taken[1] and taken[2] == taken[3]
        total += len(taken[0]) + len(taken[2])
    assert total == 10 * GROUP
