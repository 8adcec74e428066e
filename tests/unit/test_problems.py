"""Problems from files: fields, answers, ids, bad rows; a hub out of reach, jobs without network."""

import gzip
import json
import logging
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from forked_cli import ForkedCli
from huggingface_hub.errors import LocalEntryNotFoundError
from rows import write_rows

from megatron_opsft.config import DataConfig, EvalConfig
from megatron_opsft.data.mixture import describe_bad_rows
from megatron_opsft.data.problems import ARITHMETIC, load_held_out, load_problems, shuffled_subset
from megatron_opsft.data.sources import check_source
from megatron_opsft.errors import HubUnreachable, UserError
from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.runtime import libraries
from megatron_opsft.runtime.libraries import asking_hub, check_cached, hub_error


def test_a_hub_that_takes_its_time_is_waited_for_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(libraries, "_PATIENCE_SECONDS", 0.01)
    for seconds, lines in ((0.3, 1), (0.0, 0)):
        caplog.clear()
        with asking_hub("me/data"):
            time.sleep(seconds)
        time.sleep(0.05)
        assert len(caplog.messages) == lines
        assert all("me/data: waiting for the Hugging Face hub" in line for line in caplog.messages)


def test_fields_are_found_and_a_gold_answer_is_what_its_text_marks(tmp_path: Path) -> None:
    deepscaler = {"problem": "1+1?", "answer": "\\frac{4}{2}", "solution": "no box here"}
    gsm8k = {"question": "2+2?", "answer": "Two and two <<2+2=4>>4.\n#### 4,321"}
    math = {"problem": "3+3?", "solution": "It is $\\boxed{\\sqrt{36}}$.", "level": 1}
    source = tmp_path / "data.jsonl"
    for row, answer in [(deepscaler, "\\frac{4}{2}"), (gsm8k, "4321"), (math, "\\sqrt{36}")]:
        assert [p.answer for p in load_problems(write_rows(source, [row])).problems] == [answer]
    rows = [{"problem": "p", "answer": value} for value in ("1,234", True, 7)]
    read = load_problems(write_rows(source, rows))
    assert [problem.answer for problem in read.problems] == ["1234", "7"]
    assert [(bad.row, bad.reason) for bad in read.bad_rows] == [
        (2, "answer is of type bool, not text or a number")
    ]


def test_rows_that_cannot_be_answered_from_text_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"problem": "Prove it.", "answer": "proof"},
        {"problem": "p", "answer": " NotFound "},
        {"problem": "How long is <image>?", "answer": "3"},
        {"problem": "p", "answer": "3", "images": ["AAAA"]},
        {
            "problem": [
                {"role": "user", "content": "<image> What is it?"},
                {"role": "assistant", "content": "A ruler."},
                {"role": "user", "content": "How long is it?"},
            ],
            "answer": "3",
        },
        {"problem": "p", "answer": "none", "images": []},
    ]
    source = write_rows(tmp_path / "data.jsonl", rows)
    read = load_problems(source)
    assert [problem.answer for problem in read.problems] == ["none"]
    assert [bad.reason for bad in read.bad_rows] == [
        "answer is 'proof', which is no answer",
        "answer is 'NotFound', which is no answer",
        *["it has an image, and only text is trained on"] * 3,
    ]
    own = load_problems(source, with_fields=True)  # an own judge knows what its answers mean
    assert [problem.answer for problem in own.problems] == ["proof", "NotFound", "none"]


def test_messages_may_be_stored_as_json_text(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    text = "[{1, 2}] is a set of what?"
    rows = [{"prompt": json.dumps(chat), "answer": "2"}, {"prompt": text, "answer": "sets"}]
    told, plain = load_problems(write_rows(tmp_path / "data.jsonl", rows)).problems
    assert (told.text, told.before[0].content) == ("1+1?", "Be brief.")
    assert (plain.text, plain.before) == (text, ())


def test_bad_lines_are_listed_with_their_line_numbers_and_ids_are_unique(tmp_path: Path) -> None:
    given = ("a", "a", 7, None, "a", "a-2")
    rows: list[Any] = [{"id": own, "problem": "p", "answer": "1"} for own in given]
    rows += ["", "{broken", "[1]", '{"answer": "1"}', '{"problem": 5, "answer": "1"}']
    rows += ['{"problem": " ", "answer": "1"}']
    source = write_rows(tmp_path / "set.v1.jsonl", rows)
    read = load_problems(source)
    assert [problem.id for problem in read.problems] == ["a", "a-2", "7", "row-4", "a-5", "a-2-6"]
    head, broken, *others, number, rest = describe_bad_rows(read, limit=4).splitlines()
    assert (head, rest) == (f"{source}: 5 of 11 rows left out", "  ... and 1 more")
    assert broken.startswith(f"  {source}:8: not JSON")
    assert others == [f"  {source}:9: a JSON list, not an object", f"  {source}:10: no problem"]
    assert number == f"  {source}:11: problem is of type int, not text"


def test_a_column_that_python_cannot_hold_is_one_line(tmp_path: Path) -> None:
    """Text that is not UTF-8, and a date after the year 9999, even where nobody asks for them."""
    offsets = pyarrow.array([0, 2], pyarrow.int32()).buffers()[1]
    text = pyarrow.StringArray.from_buffers(1, offsets, pyarrow.py_buffer(b"\xff\xfe"))
    for column in (text, pyarrow.array([2**60], pyarrow.timestamp("ms"))):
        path = str(tmp_path / "rows.parquet")
        table = pyarrow.table({"problem": ["p"], "answer": ["1"], "more": column})
        pyarrow.parquet.write_table(table, path)
        with pytest.raises(UserError, match="^[^\n]*cannot be read as Parquet[^\n]*$"):
            load_problems(path)


def test_gzip_parquet_and_saved_data_set_equal_jsonl(tmp_path: Path) -> None:
    rows = [{"id": f"q{i}", "problem": f"{i}+1?", "answer": str(i + 1)} for i in range(5)]
    source = write_rows(tmp_path / "data.jsonl", rows)
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(Path(source).read_bytes()))
    data_set = datasets.Dataset.from_list(rows)
    data_set.to_parquet(tmp_path / "data.parquet")
    data_set.save_to_disk(tmp_path / "single")
    datasets.DatasetDict(train=data_set, test=data_set.select([0])).save_to_disk(tmp_path / "both")
    expected = load_problems(source)
    assert [problem.row for problem in expected.problems] == [1, 2, 3, 4, 5]
    for name in ("data.jsonl.gz", "data.parquet", "single", "both"):
        read = load_problems(str(tmp_path / name))
        assert (read.problems, read.sha256) == (expected.problems, expected.sha256)
    with pytest.raises(UserError, match=r"data.split: .* has no split 'dev'; it has train, test"):
        load_problems(str(tmp_path / "both"), split="dev")


def test_evaluation_reads_the_test_split_with_training_s_fields_or_its_own(tmp_path: Path) -> None:
    """Of data of its own it finds the fields itself."""
    row = {"problem": "p", "answer": "1", "statement": "s", "gold": "2"}
    rows, place = datasets.Dataset.from_list([row]), str(tmp_path / "set")
    datasets.DatasetDict(train=rows, test=rows, dev=rows).save_to_disk(place)
    datasets.DatasetDict(train=rows, dev=rows).save_to_disk(tmp_path / "no_test")
    fields = {"problem_field": "statement", "answer_field": "gold"}
    training = DataConfig(train=place, **fields)
    no_test = {"data": str(tmp_path / "no_test")}
    file = {"data": write_rows(tmp_path / "eval.jsonl", [row])}
    for keys, expected in (
        ({"data": place}, ("s", "2")),
        ({"data": place, "answer_field": "answer", "split": "dev"}, ("s", "1")),
        (file, ("p", "1")),
        (file | fields, ("s", "2")),
        (no_test | {"split": "dev"}, ("p", "1")),
    ):
        found = load_held_out(training, EvalConfig(**keys))
        assert found and [(p.text, p.answer) for p in found.problems] == [expected]
    for keys, said in (
        (file | {"answer_field": "sum"}, r"eval.answer_field: .*has no field sum.*set eval.ans"),
        (no_test, r"eval.split: .* has no split 'test'; it has train, dev"),
        ({"subset": "main"}, "eval.subset=main: nothing is read with it; set eval.data"),
    ):
        with pytest.raises(UserError, match=said):
            load_held_out(training, EvalConfig(**keys))
    assert load_held_out(training, EvalConfig()) is None


NO_FIELDS = "problem_field, data.answer_field: .*no field problem.* has target, text: set data.prob"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("odd.jsonl", b'{"text": "p", "target": "1"}', NO_FIELDS),
        ("odd.jsonl", b'{"problem": "p", "target": "1"}', "answer_field: .* has no field gold"),
        ("bad.jsonl", b'{"problem": "p", "answer": null}', r"no usable row in .*\(1 bad row; "),
        ("empty.jsonl", b"\n\n", r"data: .*empty\.jsonl is empty: it has no rows"),
        ("missing.jsonl", None, "there is no file"),
        ("table.xlsx", b"PK", "not a file type that can be read; use .jsonl, .json, .csv, .tsv, "),
        ("bad.parquet", b"not what it says", "bad.parquet"),
        ("bad.jsonl.gz", b"not what it says", "bad.jsonl.gz"),
        (".", None, "save_to_disk"),
    ],
)
def test_errors_name_the_source_and_the_fix(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        load_problems(str(tmp_path / name), answer_field="gold" if "gold" in said else None)


def test_a_subset_is_drawn_with_its_seed_and_a_smaller_one_is_part_of_it() -> None:
    problems = load_problems(ARITHMETIC, split="test").problems
    subset = shuffled_subset(problems, 20, seed=1)
    assert len(set(subset)) == 20 and subset != shuffled_subset(problems, 20, seed=2)
    assert subset[:5] == shuffled_subset(problems, 5, seed=1)
    assert len(shuffled_subset(subset, 99, seed=1)) == 20


class Answered(Exception):
    """As the hub's libraries raise it for an answer of HTTP."""

    def __init__(self, status: int) -> None:
        self.response = SimpleNamespace(status_code=status)


class TransportError(Exception):
    """Of httpx, or of what stands for it in a later version of huggingface_hub."""


class ConnectTimeout(TransportError):
    pass


def test_a_hub_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("no connection\nmore")

    # Another start may find it: exit code 69. What will not pass, such as a wrong name, is 2.
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with monkeypatch.context() as online:
        online.delenv("HF_HUB_OFFLINE", raising=False)
        with pytest.raises(HubUnreachable, match=r"could not be .*no connection\); download it"):
            resolve_model("nobody/nothing")
        said = r"nobody/nothing \(main\) is not a file here[^\n]*no connection[^\n]*$"
        with pytest.raises(HubUnreachable, match=said):
            load_problems("nobody/nothing", subset="main")
        for status, kind in ((503, HubUnreachable), (429, HubUnreachable), (404, UserError)):
            error = datasets.exceptions.DatasetNotFoundError("x")
            error.__cause__ = Answered(status)
            assert type(hub_error(error, "said")) is kind, status
        for lost in (ConnectionError("x"), TimeoutError("x"), ConnectTimeout("x")):
            assert type(hub_error(lost, "said")) is HubUnreachable
        assert type(hub_error(ValueError("x"), "said")) is UserError
    with pytest.raises(UserError, match="HF_HUB_OFFLINE=1 is set"):
        resolve_model("nobody/nothing")


def test_a_job_without_network_says_at_its_start_what_is_not_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: ForkedCli
) -> None:
    words = ["train", "examples/configs/quickstart.yaml", f"run.dir={tmp_path / 'run'}"]
    offline = "import os; os.environ['HF_HUB_OFFLINE'] = '1'"
    for key in ("model.path", "data.train"):
        error = cli.run([*words, f"{key}=org/Some-Data_Set"], prelude=offline).error
        assert f"{key}=org/Some-Data_Set is not in the Hugging Face" in error
        assert "run `megatron-opsft fetch CONFIG`" in error
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(UserError, match="not in the Hugging Face cache"):
        check_source("org/Some-Data_Set")
    for folder in ("hub/datasets--org--Some-Data_Set/snapshots/1", "datasets/org___some-data_set"):
        (tmp_path / folder).mkdir(parents=True)
        check_source("org/Some-Data_Set")
        shutil.rmtree(tmp_path / folder)
    (tmp_path / "hub/models--org--M/snapshots/1").mkdir(parents=True)
    check_cached("models", "org/M", "model.path")


def test_fetch_reads_what_a_run_reads(cli: ForkedCli) -> None:
    ended = cli.run(["fetch", "examples/configs/quickstart.yaml"])
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.startswith("tiny_reasoner and ")


NO_HUB = """
import os
import huggingface_hub
os.environ.pop("HF_HUB_OFFLINE", None)
def refuse(*args, **kwargs):
    raise ConnectionError("no route to host")
huggingface_hub.snapshot_download = refuse
"""


def test_a_hub_that_does_not_answer_is_an_exit_code_after_which_jobs_start_again(
    cli: ForkedCli, tmp_path: Path
) -> None:
    words = ["train", "examples/configs/quickstart.yaml", f"run.dir={tmp_path / 'run'}"]
    ended = cli.run([*words, "model.path=nobody/nothing"], NO_HUB)
    assert ended.exit_code == 69, ended.stderr
    assert "no route to host" in ended.stderr
