"""Which benchmarks are run, from where, and what is wrong with their files; samples on disk:
nothing stored is lost, torn lines are, and the same samples give one file.
"""

import gzip
from pathlib import Path
from typing import Any

import pytest
from eval_samples import stored
from rows import write_rows

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.benchmarks import (
    Benchmark,
    SampleFiles,
    StoredSample,
    load_benchmarks,
)
from megatron_opsft.evaluate.settings import EvalSettings

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
    assert own.key(own.problems[0].id) == "mine/x-1"
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
