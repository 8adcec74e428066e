"""Which benchmarks are run, from where, and what is wrong with their files."""

import json
from pathlib import Path

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.benchmarks import KNOWN, choose_names, load_benchmark

PAPER = ("gsm8k", "math500", "amc23", "aime24", "aime25")


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_defaults_are_the_papers_or_arithmetic_for_the_tiny_reasoner() -> None:
    assert choose_names((), {}, is_tiny_reasoner=False) == PAPER
    assert choose_names((), {}, is_tiny_reasoner=True) == ("arithmetic",)
    assert choose_names((), {"mine": "x"}, is_tiny_reasoner=True) == ("mine",)
    assert choose_names(("amc23", "amc23"), {}, is_tiny_reasoner=True) == ("amc23",)
    assert [KNOWN[name].samples for name in PAPER] == [16, 16, 64, 64, 64]


@pytest.mark.parametrize("name", ["overall", "a/b", "", ".hidden", "a b"])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="letters, digits"):
        choose_names((name,), {name: "x"}, is_tiny_reasoner=False)


def test_unknown_names_are_refused_with_the_fix() -> None:
    with pytest.raises(UserError, match=r"'gsm9k' is not known.*--data gsm9k=FILE"):
        choose_names(("gsm9k",), {}, is_tiny_reasoner=False)
    with pytest.raises(UserError, match="math500 is not among the benchmarks gsm8k"):
        choose_names(("gsm8k",), {"math500": "x"}, is_tiny_reasoner=False)


def test_local_files_replace_the_hub_and_keep_the_papers_n(tmp_path: Path) -> None:
    rows = [{"problem": f"{i} + 1?", "answer": str(i + 1)} for i in range(5)]
    file = write(tmp_path / "x.jsonl", rows)
    loaded = load_benchmark("aime24", {"aime24": file}, samples=None, limit=3)
    assert (loaded.samples, len(loaded.problems), len(loaded.data.problems)) == (64, 3, 5)
    own = load_benchmark("mine", {"mine": file}, samples=None, limit=None)
    assert (own.samples, len(own.problems)) == (16, 5)
    assert own.key(own.problems[0].id) == "mine/x-1"
    assert load_benchmark("mine", {"mine": file}, samples=3, limit=None).samples == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"text": "1 + 1?", "answer": "2"}],
            "no field problem or question or prompt; it has answer, text: set problem_field",
        ),
        ([{"problem": "1 + 1?", "gold": "2"}], "no field answer"),
        ([{"problem": "a", "answer": "2"}, {"problem": "b", "answer": None}], r"x\.jsonl:2: no"),
    ],
)
def test_a_file_with_wrong_fields_names_benchmark_file_and_row(
    tmp_path: Path, rows: list[dict[str, object]], message: str
) -> None:
    file = write(tmp_path / "x.jsonl", rows)
    with pytest.raises(UserError, match="benchmark mine: .*" + message):
        load_benchmark("mine", {"mine": file}, samples=None, limit=None)


def test_the_fields_of_a_file_can_be_named(tmp_path: Path) -> None:
    rows = [{"text": "1 + 1?", "answer": "3", "gold": "2"}]
    file = write(tmp_path / "x.jsonl", rows)
    fields = {"problem_field": "text", "answer_field": "gold"}
    loaded = load_benchmark("mine", {"mine": file}, samples=None, limit=None, **fields)
    assert [(p.text, p.answer) for p in loaded.problems] == [("1 + 1?", "2")]


def test_a_missing_file_and_a_hub_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "no.jsonl"
    with pytest.raises(UserError, match=r"benchmark mine: .*no\.jsonl"):
        load_benchmark("mine", {"mine": str(missing)}, samples=None, limit=None)
    with pytest.raises(UserError, match="benchmark aime25: .*--data aime25=FILE"):
        load_benchmark("aime25", {}, samples=None, limit=None)
