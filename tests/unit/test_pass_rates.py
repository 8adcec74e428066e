"""Training problems chosen by how often a model solved them."""

from pathlib import Path

import pytest
from eval_samples import stored

from megatron_opsft.config import DataConfig
from megatron_opsft.data.problems import ProblemSet
from megatron_opsft.data.stored_samples import SampleFiles
from megatron_opsft.errors import UserError
from megatron_opsft.records import Problem
from megatron_opsft.run.start.pass_rates import keep_by_pass_rate


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    """Of p0 to p4, which 0 to 4 of 4 samples solve, in two files."""
    files = SampleFiles(tmp_path)
    for name, numbers in (("a", (0, 1, 2)), ("b", (3, 4))):
        for number in numbers:
            files.append(name, [stored(f"p{number}", n, 9, n < number) for n in range(4)])
        files.combine(name)
    (tmp_path / "results.json").touch()
    return tmp_path


def training(*ids: str, gold: str = "7") -> ProblemSet:
    problems = tuple(Problem(id=each, text="?", answer=gold) for each in ids)
    return ProblemSet(name="train.jsonl", problems=problems, bad_rows=(), sources=("train.jsonl",))


def choice(evaluation: Path, low: float, high: float) -> DataConfig:
    return DataConfig(train="train.jsonl", pass_rate=(low, high), pass_rate_from=evaluation)


IDS = [f"p{number}" for number in range(6)]  # p5 was not evaluated


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [
        (0.5, 1, ["p2", "p3", "p4"]),
        (0.25, 0.75, ["p1", "p2", "p3"]),
        (0, 0, ["p0"]),
        (0, 1, ["p0", "p1", "p2", "p3", "p4"]),
        (0.26, 0.49, None),
    ],
)
def test_problems_are_kept_whose_pass_rate_is_in_the_interval(
    evaluation: Path, low: float, high: float, kept: list[str] | None
) -> None:
    data = choice(evaluation, low, high)
    if kept is None:
        with pytest.raises(UserError, match=r"none of the 6 .* \(5 have another .* 1 no sample\)"):
            keep_by_pass_rate(training(*IDS), data)
        return
    found, note = keep_by_pass_rate(training(*IDS), data)
    assert [problem.id for problem in found.problems] == kept
    assert f"{len(kept)} of 6 problems are trained on, by 20 samples of {evaluation}" in note
    assert f"{5 - len(kept)} have another pass rate, 1 no sample" in note
    assert (found.sha256 == training(*IDS).sha256) == (len(kept) == 6)


def test_an_evaluation_of_other_problems_or_none_is_one_line(
    evaluation: Path, tmp_path: Path
) -> None:
    for others in (training("q0"), training("p4", gold="8")):
        with pytest.raises(UserError, match=r"of other problems than data\.train=train\.jsonl"):
            keep_by_pass_rate(others, choice(evaluation, 0, 1))
    with pytest.raises(UserError, match="holds no finished evaluation"):
        keep_by_pass_rate(training(*IDS), choice(tmp_path / "none", 0, 1))


def test_without_the_key_all_problems_are_trained_on() -> None:
    given = training(*IDS)
    assert keep_by_pass_rate(given, DataConfig(train="train.jsonl")) == (given, "")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"pass_rate": (0, 1)}, "data.pass_rate_from is missing"),
        ({"pass_rate_from": "eval"}, "data.pass_rate is missing"),
        ({"pass_rate": (0.5, 0.4), "pass_rate_from": "eval"}, "must be .low, high., shares from 0"),
        ({"pass_rate": (0.5, 2), "pass_rate_from": "eval"}, "must be .low, high., shares from 0"),
    ],
)
def test_half_a_choice_is_one_line(keys: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        DataConfig(train="train.jsonl", **keys)
