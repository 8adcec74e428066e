"""The requests of an evaluation: what is missing, seeded, the longest first."""

from megatron_opsft.data.problems import ProblemSet
from megatron_opsft.evaluate.benchmarks import Benchmark
from megatron_opsft.evaluate.work import make_tickets
from megatron_opsft.records import Problem
from megatron_opsft.rollout.requests import PromptRequest
from megatron_opsft.rollout.sampling import response_seed


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
