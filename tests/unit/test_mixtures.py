"""Mixtures of sources, and held-out problems."""

import csv
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rows import problem_set, write_rows

from megatron_opsft.config import Config, DataConfig
from megatron_opsft.config.load import config_hash, load_config, to_yaml
from megatron_opsft.data.mixture import (
    ProblemSampler,
    asked,
    describe_bad_rows,
    describe_data,
    drop_unusable_prompts,
    leave_out_held_out,
    load_training,
    order_of,
    take_held_out,
)
from megatron_opsft.data.problems import ProblemSet, load_problems
from megatron_opsft.errors import UserError
from megatron_opsft.records import Problem


def config_of(train: object, *overrides: str) -> Config:
    return load_config(None, ["model.path=m", f"data.train={json.dumps(train)}", *overrides])


@pytest.fixture
def mixed(tmp_path: Path) -> DataConfig:
    """Six problems of a, asked for as `q`, and three of b, one of which a has too."""
    a = [{"id": n, "q": f"a{n}", "answer": n} for n in range(6)]
    b = [{"id": n, "problem": f"b{n}", "answer": n} for n in range(2)]
    b += [{"problem": "b", "answer": None}, {"id": 9, "problem": "a0", "answer": 0}]
    of_a = {"path": write_rows(tmp_path / "a.jsonl", a), "weight": 3, "problem_field": "q"}
    return config_of([of_a, {"path": write_rows(tmp_path / "b.jsonl", b)}]).data


def test_sources_are_read_one_behind_the_other_each_with_its_fields(mixed: DataConfig) -> None:
    read = load_training(mixed, with_fields=False)
    assert [p.text for p in read.problems] == [*(f"a{n}" for n in range(6)), "b0", "b1", "a0"]
    assert [problem.id for problem in read.problems] == [*"012345", "0@2", "1@2", "9"]
    assert [problem.source_index for problem in read.problems] == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    short = drop_unusable_prompts(read, lambda p: range(9 if p.text == "a1" else 1), 4)
    for chosen in take_held_out(short, 2, seed=0):
        assert all(p.source_index == ("@" in p.id or p.id == "9") for p in chosen.problems)
    a, b = read.sources
    assert read.name == f"{a} + {b}" == mixed.name
    assert [(bad.source, bad.row) for bad in read.bad_rows] == [(b, 3)]
    assert order_of(read, mixed, 0).members == (tuple(range(6)), (6, 7, 8))
    with pytest.raises(UserError, match=r"no problem of .*b\.jsonl is left"):
        order_of(replace(read, problems=read.problems[:6]), mixed, 0)


def drawn(order: ProblemSampler, num: int) -> list[int]:
    return [index for step in range(num) for index in order.indices(step)]


def mixture(weights: Sequence[float], sizes: Sequence[int], batch_size: int = 8) -> ProblemSampler:
    members = tuple(tuple(range(sum(sizes[:n]), sum(sizes[: n + 1]))) for n in range(len(sizes)))
    return ProblemSampler(members=members, weights=tuple(weights), batch_size=batch_size, seed=5)


@pytest.mark.parametrize("weights", [(3, 1), (0.1, 0.2, 0.7), (5, 0.01), (1, 2, 3, 4)])
def test_draws_follow_the_weights_at_every_moment(weights: tuple[float, ...]) -> None:
    order = mixture(weights, [7, 100, 13, 50][: len(weights)])
    counts = [0] * len(weights)
    for n, index in enumerate(drawn(order, 150), start=1):
        counts[next(part for part, own in enumerate(order.members) if index in own)] += 1
        wanted = [n * weight / sum(weights) for weight in weights]
        assert max(abs(c - w) for c, w in zip(counts, wanted, strict=True)) < len(weights)


def test_each_source_goes_through_epochs_of_its_own() -> None:
    order = mixture((3, 1), (12, 5))
    indices = drawn(order, 40)
    for members in order.members:
        own = [index for index in indices if index in members]
        size = len(members)
        epochs = [own[n : n + size] for n in range(0, len(own) - size + 1, size)]
        assert all(sorted(epoch) == list(members) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 10


def test_draws_depend_on_seed_and_position_alone_and_are_the_same_in_every_release() -> None:
    order, state = mixture((3, 1), (12, 5)), random.getstate()
    assert drawn(order, 12) == drawn(mixture((3, 1), (12, 5), batch_size=12), 8)
    assert drawn(order, 8)[56:] == mixture((3, 1), (12, 5)).indices(7)
    assert drawn(order, 4) != drawn(replace(order, seed=6), 4)
    assert random.getstate() == state
    assert order.indices(0) == [14, 2, 9, 10, 15, 7, 5, 3]
    assert replace(mixture((1,), (8,)), seed=0).indices(0) == [2, 3, 4, 7, 1, 5, 0, 6]


def test_a_mixture_is_written_and_loaded_again(tmp_path: Path) -> None:
    config = config_of([{"path": "a", "weight": 2}, {"path": "~/b"}])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_config(file) == config
    assert config.data.sources[1].path == str(Path.home() / "b")
    hashes = [config_hash(c) for c in (config_of("a"), config_of([{"path": "a"}]), config)]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        ([], r"a list of \{path: ..., weight: ...\}"),
        (5, r"a list of \{path: ..., weight: ...\}"),
        ([{"path": "b", "weight": 0}], "entry 1: weight: Input should be greater"),
        ([{"path": "a", "wieght": 1}], "entry 1: wieght: .*an entry has path, weight, split"),
        (["a"], "entry 1: Input should be a valid dictionary"),
    ],
)
def test_a_wrong_mixture_is_one_line(train: object, reason: str) -> None:
    with pytest.raises(UserError, match="config key data.train=.*" + reason) as caught:
        config_of(train)
    assert "\n" not in str(caught.value)


def set_of(*pairs: tuple[str, str]) -> ProblemSet:
    problems = (Problem(id=str(n), text=t, answer=a) for n, (t, a) in enumerate(pairs))
    return problem_set("d.jsonl", problems)


TEN = set_of(*((f"p{n}", str(n)) for n in range(10)))


def test_held_out_problems_are_taken_from_training_with_the_seed() -> None:
    train, held = take_held_out(TEN, 3, seed=0)
    assert (len(train.problems), len(held.problems)) == (7, 3)
    assert {*train.problems, *held.problems} == {*TEN.problems}
    assert take_held_out(TEN, 3, seed=0) == (train, held)
    assert take_held_out(TEN, 3, seed=1)[1].problems != held.problems
    assert len({train.sha256, held.sha256, TEN.sha256}) == 3
    assert all(int(problem.id) + 1 == problem.row for problem in train.problems)
    with pytest.raises(UserError, match=r"eval.holdout=10: d.jsonl has only 10 different"):
        take_held_out(TEN, 10, seed=0)
    for seed in range(5):  # in no other row
        train, held = take_held_out(set_of(("a", "1"), ("b", "2"), ("a", "1")), 1, seed)
        assert not {p.text for p in train.problems} & {p.text for p in held.problems}
    spaced = set_of(("a  b", "1"), (" a b", "1"), ("a\nb\n", "1"), ("c", "2"), ("d", "3"))
    for seed in range(20):
        sides = take_held_out(spaced, 1, seed)
        assert not {asked(p) for p in sides[0].problems} & {asked(p) for p in sides[1].problems}


def test_what_is_evaluated_is_left_out_of_training_and_said() -> None:
    one, other = set_of((" p1\n", "1"), ("p2", "2")), set_of(("p2", "2"), ("q", "3"))
    assert leave_out_held_out(TEN, {}) == TEN
    left = leave_out_held_out(TEN, {"eval.data": one, "eval.more.x": other})
    assert [p.text for p in left.problems] == ["p0", *(f"p{n}" for n in range(3, 10))]
    said = describe_bad_rows(left).splitlines()
    assert said[0] == "d.jsonl: 2 of 10 rows left out"
    assert said[1] == "  d.jsonl:2: also in eval.data: what is evaluated is not trained on"
    assert describe_bad_rows(left, num_taken=5).startswith("d.jsonl: 2 of 15 rows left out")
    with pytest.raises(UserError, match=r"data.train=d.jsonl: all of its 10 problems are also in "):
        leave_out_held_out(TEN, {"eval.data": TEN})


def notes_on(config: Config, problems: ProblemSet, held_out: ProblemSet | None) -> list[str]:
    """What a run says of its data."""
    return describe_data(config.data, config.run.steps, problems, held_out)


def test_problems_with_several_gold_answers_are_counted() -> None:
    usual = config_of("d.jsonl", "data.prompts_per_step=1", "run.steps=1")
    same = set_of(("a", "1/2"), ("a ", "1 / 2"), ("b", "1"))
    assert notes_on(usual, same, TEN) == []
    both = set_of(("a", "12"), ("b", "1"), (" a", "32"), ("a", "12"))
    (said,) = notes_on(usual, both, TEN)
    assert said.startswith("1 of 2 problems have several gold answers, such as '12' in row 1 and")


def test_what_is_unusual_is_said_and_nothing_else(mixed: DataConfig) -> None:
    usual = config_of("d.jsonl", "data.prompts_per_step=5", "run.steps=2")
    assert notes_on(usual, TEN, TEN) == []
    (none,) = notes_on(usual, TEN, None)
    assert "nothing is evaluated: d.jsonl has no held" in none and "eval.holdout=N" in none
    twice = config_of("d.jsonl", "data.prompts_per_step=5", "run.steps=4")
    (again,) = notes_on(twice, TEN, TEN)
    assert again.endswith("each of the 10 problems of d.jsonl 2.0 times")
    almost = config_of("d.jsonl", "data.prompts_per_step=19", "run.steps=1")
    assert notes_on(almost, TEN, TEN) == []  # a second pass that has begun is no news
    often = config_of("d.jsonl", "data.prompts_per_step=5", "run.steps=5")
    (again,) = notes_on(often, TEN, TEN)
    assert again == "5 steps of 5 problems use each of the 10 problems of d.jsonl 2.5 times"
    both = usual.model_copy(update={"data": mixed.model_copy(update={"prompts_per_step": 4})})
    read = load_training(mixed, with_fields=False)
    (of_b,) = notes_on(both, replace(read, problems=read.problems[:7], bad_rows=()), TEN)
    assert notes_on(both, replace(read, problems=read.problems[:6], bad_rows=()), TEN) == []
    end = f"of the 1 problem of {read.sources[1]} 2.0 times"
    assert of_b == f"2 steps of 1 problem use each {end}"


def test_too_few_problems_to_hold_out_say_which_rows_were_refused(tmp_path: Path) -> None:
    """Of two rows one is left, and none can be held out."""
    rows = [{"problem": "a", "answer": "1"}, {"problem": "b", "answer": None}]
    source = write_rows(tmp_path / "d.jsonl", rows)
    said = r"only 1 different problems \(1 bad row; first: row 2: no answer\)"
    with pytest.raises(UserError, match=said):
        take_held_out(load_problems(source), 1, seed=0)


def test_a_row_that_repeats_a_held_out_problem_is_evaluated_once_and_counted(
    tmp_path: Path,
) -> None:
    """Every row is trained on, held out or a bad row; one that repeats a training problem stays."""
    rows = [{"problem": f"p{n}", "answer": n} for n in range(6)]
    rows += [{"problem": "p1", "answer": 1}, {"problem": " p2 ", "answer": 9}]
    path = tmp_path / "d.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("problem", "answer"), *(row.values() for row in rows)])
    read = load_problems(str(path))
    seen = set()
    for seed in range(20):
        train, held = take_held_out(read, 4, seed)
        assert len({asked(p) for p in held.problems}) == len(held.problems) == 4
        assert len(train.problems) + 4 + len(train.bad_rows) == 8
        texts = [p.text for p in held.problems]
        assert not {*texts} & {p.text.strip() for p in train.problems}
        assert train.problems.count(read.problems[6]) == ("p1" not in texts)
        reasons = {bad.place: bad.reason for bad in train.bad_rows if bad.is_repeat}
        expected = {}
        if "p1" in texts:
            expected[f"{path}, row 7"] = f"repeats {path}, row 2, which is held out"
        if "p2" in texts:
            more = ", with another answer"
            expected[f"{path}, row 8"] = f"repeats {path}, row 3, which is held out{more}"
        assert reasons == expected
        seen.add(len(reasons))
    assert seen == {0, 1, 2}
    plain = take_held_out(TEN, 3, seed=0)  # as in every release
    assert [p.text for p in plain[1].problems] == ["p1", "p4", "p8"]
    assert plain[0].bad_rows == ()
