"""Which benchmarks are run, from where, and what is wrong with their files."""

from pathlib import Path
from typing import Any

import pytest
from rows import write_rows

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.benchmarks import Benchmark, load_benchmarks
from megatron_opsft.evaluate.settings import EvalSettings

PAPER = ("gsm8k", "math500", "amc23", "aime24", "aime25")


def load(tiny: bool = False, **settings: Any) -> tuple[Benchmark, ...]:
    return load_benchmarks(EvalSettings(model="m", out="o", **settings), is_tiny_reasoner=tiny)


def test_defaults_are_the_papers_or_arithmetic_for_the_tiny_reasoner(tmp_path: Path) -> None:
    assert [benchmark.name for benchmark in load(tiny=True)] == ["arithmetic"]
    file = write_rows(tmp_path / "x.jsonl", [{"problem": "1 + 1?", "answer": "2"}])
    paper = load(data=dict.fromkeys(PAPER, file), benchmarks=(*PAPER, "amc23"))
    assert [(benchmark.name, benchmark.samples) for benchmark in paper] == [
        *(("gsm8k", 16), ("math500", 16), ("amc23", 64), ("aime24", 64), ("aime25", 64))
    ]
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


def test_a_bad_row_names_benchmark_file_and_row(tmp_path: Path) -> None:
    rows = [{"problem": "a", "answer": "2"}, {"problem": "b", "answer": None}]
    file = write_rows(tmp_path / "x.jsonl", rows)
    with pytest.raises(UserError, match=r"benchmark mine: .*x\.jsonl:2: no"):
        load(data={"mine": file})


def test_wrong_names_are_refused() -> None:
    for name in ("overall", "a/b", ".hidden", "a b"):
        with pytest.raises(UserError, match="letters, digits"):
            load(data={name: "x"})
    with pytest.raises(UserError, match="math500 is not among the benchmarks gsm8k"):
        load(benchmarks=("gsm8k",), data={"math500": "x"})
