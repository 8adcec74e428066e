"""Dealing out an evaluation's samples: each one once, to whoever has room, evenly at the end."""

import threading
import time
from dataclasses import dataclass, field

import pytest

from megatron_opsft.data.problems import ProblemSet
from megatron_opsft.evaluate.benchmarks import Benchmark
from megatron_opsft.evaluate.work import WorkQueue, make_tickets
from megatron_opsft.records import Problem
from megatron_opsft.rollout.engine import PromptRequest, Replica
from megatron_opsft.rollout.sampling import response_seed
from megatron_opsft.runtime.job import Job


@dataclass
class MemoryStore:
    """torch's key-value store, as far as a job uses it."""

    values: dict[str, int | str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, amount: int) -> int:
        with self.lock:
            self.values[name] = int(self.values.get(name, 0)) + amount
            return int(self.values[name])

    def set(self, name: str, value: str) -> None:
        self.values[name] = value

    def wait(self, names: list[str], timeout: object) -> None:
        assert all(name in self.values for name in names)

    def get(self, name: str) -> bytes:
        return str(self.values[name]).encode()


def benchmark(name: str, num_problems: int, samples: int) -> Benchmark:
    problems = tuple(
        Problem(id=f"p{i}", text=f"{name} {i}", answer="1") for i in range(num_problems)
    )
    data = ProblemSet(
        name=name,
        problems=problems,
        rows=tuple(range(1, num_problems + 1)),
        bad_rows=(),
        sha256="0",
    )
    return Benchmark(name=name, data=data, problems=problems, samples=samples)


def prompts_of(benchmarks: list[Benchmark]) -> dict[str, tuple[int, ...]]:
    return {b.key(p.id): (1, 2, int(p.id[1:]) + 3) for b in benchmarks for p in b.problems}


def pairs(requests: list[PromptRequest]) -> list[tuple[str, int]]:
    return [(r.problem_id, index) for r in requests for index in r.sample_indices]


def test_tickets_are_what_is_missing_seeded_by_benchmark_problem_and_index() -> None:
    benchmarks = [benchmark("a", 3, 5), benchmark("b", 2, 20)]
    done = {"a": {("p0", i) for i in range(5)} | {("p1", 2)}, "b": {("p1", 19)}}
    tickets = make_tickets(benchmarks, prompts_of(benchmarks), done, seed=7)
    wanted = {
        (b.key(p.id), i)
        for b in benchmarks
        for p in b.problems
        for i in range(b.samples)
        if (p.id, i) not in done[b.name]
    }
    assert sorted(pairs(tickets)) == sorted(wanted)
    assert all(len(ticket.seeds) <= 16 for ticket in tickets)
    assert tickets[0].problem_id.startswith("b/")
    for ticket in tickets:
        for index, seed in zip(ticket.sample_indices, ticket.seeds, strict=True):
            assert seed == response_seed(7, 0, ticket.problem_id, index)
    # The same problem id in two benchmarks is two problems.
    assert len({seed for ticket in tickets for seed in ticket.seeds}) == len(wanted)


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_every_sample_is_dealt_once_and_never_more_than_there_is_room(num_replicas: int) -> None:
    benchmarks = [benchmark("a", 10, 16), benchmark("b", 7, 37)]
    tickets = make_tickets(benchmarks, prompts_of(benchmarks), {"a": set(), "b": set()}, seed=0)
    store = MemoryStore()
    dealt: list[list[tuple[str, int]]] = [[] for _ in range(num_replicas)]

    def work(index: int) -> None:
        job = Job(rank=index, world_size=num_replicas, id="job", store=store)
        queue = WorkQueue("q", tickets, job, Replica(index=index, count=num_replicas))
        for number in range(10_000):
            room = 1 + (number * 7 + index) % 40
            requests = queue.take(room)
            got = pairs(requests)
            assert len(got) <= room
            if not got:
                return
            dealt[index] += got
            time.sleep(0.0005 * len(got) * (1 + index))  # replica 0 is the fastest

    threads = [threading.Thread(target=work, args=(index,)) for index in range(num_replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [pair for part in dealt for pair in part]
    assert sorted(everything) == sorted(pairs(tickets))
    assert len(set(everything)) == len(everything) == 160 + 7 * 37
    if num_replicas > 1:
        assert len(dealt[0]) > len(dealt[-1])


def test_a_large_batch_does_not_take_everything_at_the_end() -> None:
    benchmarks = [benchmark("a", 32, 16)]
    tickets = make_tickets(benchmarks, prompts_of(benchmarks), {"a": set()}, seed=0)
    job = Job(rank=0, world_size=2, id="job", store=MemoryStore())
    queues = [WorkQueue("q", tickets, job, Replica(index=i, count=2)) for i in range(2)]
    sizes = []
    while got := [len(pairs(queue.take(512))) for queue in queues]:
        if not any(got):
            break
        sizes += got
    assert sizes[0] == 128  # half of one engine's share of 512
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == 512


def test_tensor_parallel_ranks_get_the_same_work() -> None:
    benchmarks = [benchmark("a", 5, 16)]
    tickets = make_tickets(benchmarks, prompts_of(benchmarks), {"a": set()}, seed=0)
    store = MemoryStore()

    def queue(rank: int) -> WorkQueue:
        job = Job(rank=rank, world_size=4, id="job", store=store)
        return WorkQueue(
            "q", tickets, job, Replica(index=rank // 2, count=2, answers=rank % 2 == 0)
        )

    queues = [queue(rank) for rank in range(4)]
    total = 0
    for _ in range(20):
        taken = [q.take(12) for q in queues]
        assert taken[0] == taken[1] and taken[2] == taken[3]
        total += len(pairs(taken[0])) + len(pairs(taken[2]))
    assert total == 80
