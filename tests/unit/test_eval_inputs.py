"""What an evaluation reads: settings, and which benchmarks from where. What it stores: nothing is
lost, torn lines are, and the same samples give one file. Its work: what is missing, seeded, the
longest first; engines take each response once.
"""

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from commands import read_command
from eval_samples import stored
from rows import problem_set, write_rows

from megatron_opsft.commands.evaluate.benchmarks import Benchmark, load_benchmarks
from megatron_opsft.commands.evaluate.commands import Evaluate
from megatron_opsft.commands.evaluate.settings import EvalSettings, load_settings
from megatron_opsft.commands.evaluate.work import WorkQueue, missing_requests
from megatron_opsft.data.stored_samples import SampleFiles, StoredSample
from megatron_opsft.errors import UserError
from megatron_opsft.records import Problem
from megatron_opsft.rollout.engine import EngineShare
from megatron_opsft.rollout.requests import ResponseRequest, make_requests
from megatron_opsft.rollout.sampling import response_seed
from megatron_opsft.runtime.job import Job

PAPER = ("gsm8k", "math500", "amc23", "aime24", "aime25")


def load(tiny: bool = False, **settings: Any) -> tuple[Benchmark, ...]:
    return load_benchmarks(EvalSettings(model="m", out="o", **settings), is_tiny_reasoner=tiny)


def test_defaults_are_the_papers_or_arithmetic_for_the_tiny_reasoner(tmp_path: Path) -> None:
    assert [benchmark.name for benchmark in load(tiny=True)] == ["arithmetic"]
    file = write_rows(tmp_path / "x.jsonl", [{"problem": "1 + 1?", "answer": "2"}])
    paper = load(data=dict.fromkeys(PAPER, file), benchmarks=(*PAPER, "amc23"))
    samples = zip(PAPER, (16, 16, 64, 64, 64), strict=True)
    assert [(benchmark.name, benchmark.samples) for benchmark in paper] == [*samples]
    with pytest.raises(UserError, match="benchmark gsm8k: .*--data gsm8k=FILE"):
        load()  # the first of them from a hub that is not there


def test_local_files_replace_the_hub_and_keep_the_papers_n(tmp_path: Path) -> None:
    rows = [{"text": f"{i} + 1?", "answer": "no", "problem": "no", "gold": i} for i in range(5)]
    file = write_rows(tmp_path / "x.jsonl", rows)
    (loaded,) = load(data={"aime24": file}, limit=3)
    assert (loaded.samples, len(loaded.problems), len(loaded.data.problems)) == (64, 3, 5)
    (own,) = load(data={"mine": file}, problem_field="text", answer_field="gold")
    assert (own.samples, own.problems[1].text, own.problems[1].answer) == (16, "1 + 1?", "1")
    assert own.key(own.problems[0].id) == "mine/row-1"
    assert load(data={"mine": file}, samples=3)[0].samples == 3
    assert load(data={"mine": file}, temperature=0)[0].samples == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(({"data": {n: "FILE"}}, "letters, digits") for n in ("overall", "a/b", ".hidden", "a b")),
        ({"benchmarks": ("gsm8k",), "data": {"math500": "FILE"}}, "math500 is not among .* gsm8k"),
        ({"data": {"mine": "FILE"}}, r"benchmark mine: .*x\.jsonl:2: no"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    rows = [{"problem": "a", "answer": "2"}, {"problem": "b", "answer": None}]
    file = write_rows(tmp_path / "x.jsonl", rows)
    with pytest.raises(UserError, match=words):
        load(**settings | {"data": dict.fromkeys(settings["data"], file)})


def sample(problem: str, index: int) -> StoredSample:
    return stored(problem, index, 12, correct=True)


def test_what_was_appended_comes_back_in_order_without_a_torn_line(tmp_path: Path) -> None:
    one, other = SampleFiles(tmp_path), SampleFiles(tmp_path)
    one.append("a", [sample("q", 1), sample("p", 2)])
    (part,) = (tmp_path / "samples/parts").iterdir()
    other.append("a", [sample("p", 0)])
    other.append("a.b", [sample("z", 0)])
    assert [(s.problem_id, s.sample_index) for s in one.read("a")] == [("p", 0), ("p", 2), ("q", 1)]
    assert one.read("a")[0] == sample("p", 0)
    assert [s.problem_id for s in one.read("a.b")] == ["z"] and one.read("b") == []
    part.write_bytes(part.read_bytes()[:-1])
    assert [(s.problem_id, s.sample_index) for s in one.read("a")] == [("p", 0), ("q", 1)]
    part.write_text('{"problem_id": "p"}\n')
    with pytest.raises(UserError, match="a line is no sample"):
        one.read("a")


def test_one_file_in_the_end_whoever_wrote_the_parts(tmp_path: Path) -> None:
    samples = [sample(f"p{i % 3}", i // 3) for i in range(12)]
    for name, order, cut in (("x", samples, 5), ("y", samples[::-1], 8)):
        for part in (order[:cut], order[cut:], order[:2]):  # some are there twice
            SampleFiles(tmp_path / name).append("a", part)
        SampleFiles(tmp_path / name).combine("a")
        assert not (tmp_path / name / "samples/parts").exists()
    one, other = ((tmp_path / name / "samples/a.jsonl.gz").read_bytes() for name in "xy")
    assert one == other and len(gzip.decompress(one).splitlines()) == 12


def test_a_kill_while_parts_are_combined_loses_nothing(tmp_path: Path) -> None:
    for index in (0, 1):
        SampleFiles(tmp_path).append("a", [sample("p", index)])
    path = min((tmp_path / "samples/parts").iterdir())
    part = path.read_bytes()
    SampleFiles(tmp_path).combine("a")
    path.parent.mkdir()
    path.write_bytes(part)  # killed after one part was removed
    later = SampleFiles(tmp_path)
    later.append("a", [sample("p", 2)])
    SampleFiles(tmp_path).combine("a")
    assert [s.sample_index for s in later.read("a")] == [0, 1, 2]
    assert len(gzip.decompress((tmp_path / "samples/a.jsonl.gz").read_bytes()).splitlines()) == 3


def settings_of(*words: str) -> EvalSettings:
    """What `megatron-opsft eval WORDS` evaluates."""
    read = read_command(["eval", "--out", "o", *words])
    assert isinstance(read, Evaluate)
    return load_settings(read.config, read.keys)


def test_options_are_settings_and_win_over_the_file(tmp_path: Path) -> None:
    rows = ["model: m", "name: n", "limit: 9", "data: {a: f, b: g}", "deer: {max_trials: 3}"]
    config = write_rows(tmp_path / "eval.yaml", rows)
    given = {"name": "07", "deer.threshold": 0.9, "max_tokens": 100, "budgets": "10,20", "tp": 2}
    given |= {"engine": "vllm", "deer.transition_words": "Wait,But", "benchmarks": "a,b"}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    keys = [f"{name}={value}" for name, value in given.items()]
    settings = settings_of(config, *options, "--data", "b=h", "--data", "c=i")
    assert settings == settings_of(*keys, "data.b=h", config, "data.c=i")
    assert {*settings_of("model=m", "data.my-set=h", "data.my_set=i").data} == {"my-set", "my_set"}
    assert (settings.model, settings.name, settings.out) == ("m", "07", Path("o"))
    assert settings.data == {"a": "f", "b": "h", "c": "i"}
    assert settings.limit == 9 and settings.deer.max_trials == 3
    assert settings.deer.transition_words == ("Wait", "But") and settings.budgets == (10, 20)
    with pytest.raises(UserError, match="samples=4 with temperature=0: all samples of a problem"):
        settings_of(config, "--temperature", "0", "samples=4")


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


def test_every_response_is_taken_once_and_the_fast_take_more() -> None:
    """Never more than there is room, and at the start none is idle."""
    queues = queues_of(2, 3)
    assert [len(queue.take(100)) for queue in queues * 2] == [6, 6, 4, 0, 0, 0]
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


def test_tensor_parallel_ranks_get_the_same_work() -> None:
    queues = queues_of(10, 2, 2)
    total = 0
    for _ in range(20):
        taken = [pairs(queue.take(12)) for queue in queues]
        assert taken[0] == taken[1] and taken[2] == taken[3]
        total += len(taken[0]) + len(taken[2])
    assert total == 10 * GROUP
