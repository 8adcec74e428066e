"""Rows and judges that a script hands over: their files, their identity, and what is refused."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy
import pandas
import pytest
from forked_cli import ROOT, ForkedCli
from own_judges import last_box
from responses import rollout_of
from small_run import QUICKSTART, SMALL_RUN

from megatron_opsft import evaluate, load_config, train
from megatron_opsft.commands import api
from megatron_opsft.config import VerifyConfig
from megatron_opsft.data.handed import write_rows
from megatron_opsft.data.problems import load_problems
from megatron_opsft.errors import UserError
from megatron_opsft.records import Outcome, Problem
from megatron_opsft.verify.handed_judge import make_handed_judge_importable, pack_judge
from megatron_opsft.verify.verifier import Verifier, check_judge, describe_judge

ROWS = [
    {"problem": "1+1?", "answer": 2, "level": 1.5},
    {"problem": "π?", "answer": "3.14", "level": None},
]
MORE = [{"problem": "p", "answer": "1"}]
LIMIT = 3


def test_lists_data_sets_and_data_frames_are_the_same_lines(tmp_path: Path) -> None:
    text = [row | {"answer": str(row["answer"])} for row in ROWS]
    frame = pandas.DataFrame(text)  # its missing level is NaN
    for data in (text, tuple(text), datasets.Dataset.from_list(text), frame):
        path = write_rows(data, tmp_path / "new/run", where="train: data")
        read = [json.loads(line) for line in path.read_text().splitlines()]
        assert read == text
    assert len(list((tmp_path / "new/run").iterdir())) == 1
    assert re.fullmatch(r"data_[0-9a-f]{16}\.jsonl", path.name)
    assert [(p.text, p.answer, p.row) for p in load_problems(str(path)).problems] == [
        ("1+1?", "2", 1),
        ("π?", "3.14", 2),
    ]
    typed = [{"problem": numpy.str_("p"), "answer": numpy.int64(7), "ids": numpy.arange(2)}]
    other = write_rows(typed, tmp_path, where="train: data")
    assert json.loads(other.read_text()) == {"problem": "p", "answer": 7, "ids": [0, 1]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "train: data is empty: it has no rows"),
        ("rows.jsonl", "is of type str, not rows: .* a file is named by a key"),
        (datasets.DatasetDict(), r"is of type DatasetDict, not rows: .*\(of a DatasetDict one spl"),
        (7, "is of type int, not rows"),
        ([ROWS[0], ["p", "1"]], "train: data: row 2 is of type list, not a dict"),
        ([ROWS[0], {"problem": "p", "image": b"x"}], "row 2: column image .*type bytes.*leave it"),
    ],
)
def test_what_is_no_rows_is_one_line(tmp_path: Path, data: object, said: str) -> None:
    with pytest.raises(UserError, match=f"^[^\n]*{said}[^\n]*$"):
        write_rows(data, tmp_path, where="train: data")
    assert list(tmp_path.iterdir()) == []


def named(judge: object) -> str:
    return pack_judge(judge, where="train: judge").name


def judge_with(limit: int) -> Callable[..., bool]:
    return lambda text, gold, fields: len(text) > limit


def test_a_judge_s_name_is_of_its_code_and_what_it_refers_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever the code stands. What can be imported keeps its name, and needs no file."""
    packed = pack_judge(last_box, where="train: judge")
    assert packed == ("own_judges:last_box", b"")

    def first(text: str, gold: str, fields: Any) -> bool:
        return len(text) > LIMIT

    def again(text: str, gold: str, fields: Any) -> bool:
        return len(text) > LIMIT

    def other(text: str, gold: str, fields: Any) -> bool:
        return len(text) >= LIMIT

    before = named(first)
    assert before == named(again) and re.fullmatch(r"judge_[0-9a-f]{16}:judge", before)
    partials = [partial(first, fields={"a": {1, limit}}) for limit in (2, 3)]
    names = [before, named(other), *map(named, partials), named(judge_with(1))]
    names += [named(judge_with(2)), named(lambda text, gold, fields=1: True)]
    names += [named(lambda text, gold, fields=2: True), named(lambda text, gold, fields: True)]
    names += [named(re.compile(word).search) for word in "ab"]  # what a method belongs to
    assert len(set(names)) == len(names)
    monkeypatch.setitem(globals(), "LIMIT", 4)  # a global that it reads
    assert named(first) not in names


PACK = """
import dataclasses, enum, re
from megatron_opsft.verify.handed_judge import pack_judge
WORDS = {"one", "two", "three"}
PATTERN = re.compile("[ab]+")

@dataclasses.dataclass
class Limits:
    most: int = MOST

    @property
    def double(self):
        return 2 * self.most

class Kind(enum.Enum):
    NONE = "none"

class Slotted:
    __slots__ = ("a",)
    WORDS = {"five", "six", "seven"}

    @staticmethod
    def least(): return 1

def helper(text):
    helper.calls = Kind.NONE, Slotted.least()
    return helper(text[1:]) if text else Limits().double

def judge(text, gold, fields):
    return bool(PATTERN.search(text)) and gold in {"x", "y", "z"} and text in WORDS and helper(gold)

print(pack_judge(judge, where="j").name)
"""


def test_a_judge_s_name_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Sets have another order there, and the code another place."""
    names = []
    for seed, lines, most in ((1, 0, 3), (2, 5, 3), (3, 0, 4)):
        script = tmp_path / f"script{seed}.py"
        script.write_text("\n" * lines + PACK.replace("MOST", str(most)))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(seed)}
        command = [sys.executable, str(script)]
        names.append(subprocess.check_output(command, text=True, env=environment))
    assert names[0] == names[1] != names[2]


def test_workers_judge_with_a_lambda_from_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    limit = 5
    packed = pack_judge(
        lambda text, gold, fields: len(text) > limit and gold in text + fields["more"],
        where="train: judge",
    )
    config = VerifyConfig(judge=packed.name, workers=1)
    with pytest.raises(UserError, match=r"judge judge_\w+:judge: .* cannot be imported"):
        check_judge(config)
    packed.write(tmp_path)
    packed.write(tmp_path)
    make_handed_judge_importable("math", tmp_path)
    assert str(tmp_path) not in sys.path
    make_handed_judge_importable(packed.name, tmp_path)
    problems = {n: Problem(id=n, text="", answer=n, fields={"more": "b"}) for n in "abc"}
    rollouts = [
        rollout_of(text, [1], problem_id=problem_id, sample_index=0, prompt_ids=[1])
        for text, problem_id in (("aaaaaa", "a"), ("aaaaaa", "b"), ("aaaaaa", "c"), ("a", "a"))
    ]
    with Verifier(config) as verifier:
        outcomes = [verdict.outcome for verdict in verifier.score(rollouts, problems)]
    assert outcomes == [Outcome.CORRECT, Outcome.CORRECT, Outcome.WRONG, Outcome.WRONG]
    assert describe_judge(config, "") == packed.name
    (module,) = tmp_path.glob("judge_*.py")
    own = f"({sys.version_info[0]}, {sys.version_info[1]})"
    module.write_text(module.read_text().replace(own, "(3, 5)"))
    with pytest.raises(UserError, match="pickled by Python 3.5, and only that reads it"):
        check_judge(config)


def test_judges_that_cannot_be_handed_over_are_one_line(tmp_path: Path) -> None:
    lock = threading.Lock()
    config = load_config(QUICKSTART, {"run.dir": tmp_path / "run"})
    for judge, said in (
        (7, "train: judge is of type int, not a function of"),
        ("maths", "train: judge: 'maths' is not a judge; write math, package.module:function, or"),
        (lambda text, gold, fields: lock, "train: judge cannot be pickled .TypeError: cannot"),
    ):
        with pytest.raises(UserError, match=f"^[^\n]*{said}[^\n]*$"):
            train(config, judge=judge)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data_\w+\.jsonl cannot be written .*; name another dir"):
        write_rows(ROWS, tmp_path / "file/run", where="train: data")
    with pytest.raises(UserError, match="^train: data: row 1: column answer"):
        train(config, data=[{"problem": "p", "answer": b""}])
    with pytest.raises(UserError, match="^evaluate: data mine is of type int"):
        evaluate(model="tiny_reasoner", out=tmp_path / "out", data={"mine": 7})
    assert not (tmp_path / "run").exists() and not (tmp_path / "out").exists()


def test_a_judge_may_be_named_in_python(tmp_path: Path) -> None:
    """As on the command line; nothing is written for it."""
    config = load_config(QUICKSTART, {"run.dir": tmp_path, "verify.judge": "own_judges:last_box"})
    for name in ("math", "own_judges:last_box", "/a/folder/mine.py:judge"):
        assert api._with_handed(config, None, name).verify.judge == name
        assert pack_judge(name, where="") == (name, b"")
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_s_data_are_files_rows_or_both(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    out = tmp_path / "out"
    rows, more = (str(out / write_rows(data, tmp_path, where="").name) for data in (ROWS, MORE))
    keys = {"model": "tiny_reasoner", "out": str(out)}
    for data, expected in (
        (ROWS, {"data": rows}),
        (datasets.Dataset.from_list(MORE), {"data": more}),
        ({"a": file, "b": ROWS}, {"a": str(file), "b": rows}),
        ({"a": str(file)}, {"a": str(file)}),
        ([f"a={file}"], {"a": str(file)}),
    ):
        loaded = api._load_evaluation(None, keys | {"data": data})
        assert loaded.data == expected
        assert not [
            path for path in loaded.data.values() if "out" in path and not Path(path).exists()
        ]
    named = api._load_evaluation(None, keys | {"judge": "own_judges:last_box"})
    handed = api._load_evaluation(None, keys | {"judge": last_box})
    assert named.judge == handed.judge == "own_judges:last_box" and not list(out.glob("judge*"))


def test_a_run_whose_files_are_gone_says_which(cli: ForkedCli, tmp_path: Path) -> None:
    run = f"run.dir={tmp_path / 'run'}"
    gone = "verify.judge=judge_0123456789abcdef:judge"
    ended = cli.run(["train", QUICKSTART, *SMALL_RUN, run, gone])
    assert "judge judge_0123456789abcdef:judge: " in ended.error
    ended = cli.run(["train", QUICKSTART, *SMALL_RUN, run, f"data.train={tmp_path}/data_0.jsonl"])
    assert f"data.train: there is no file {tmp_path}/data_0.jsonl" in ended.error
