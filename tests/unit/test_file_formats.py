"""CSV, TSV, JSON arrays and chats that end with their answer become exact problems, or one line."""

import csv
import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from forked_cli import ForkedCli
from rows import write_rows
from small_run import QUICKSTART, SMALL_RUN

from megatron_opsft.commands.evaluate.benchmarks import load_benchmarks
from megatron_opsft.commands.evaluate.settings import EvalSettings
from megatron_opsft.data.problems import load_problems
from megatron_opsft.errors import UserError
from megatron_opsft.records import Message, Problem

LONG = "x" * 200_000  # more than Python's csv takes by itself
# With | between the values.
TABLE = f"""\ufeff|id|problem|answer|level
0|a|"What is 6 x 7?
Think, ""slowly""."|42|3

1|b|1+1?|"1,234"|
2|a|{LONG}|\\boxed{{7}}|5
"""
PROBLEMS = (
    Problem(id="a", text='What is 6 x 7?\nThink, "slowly".', answer="42", row=1),
    Problem(id="b", text="1+1?", answer="1234", row=2),
    Problem(id="a-3", text=LONG, answer="7", row=3),
)
USER = {"role": "user", "content": "1+1?"}
RIGHT = {"role": "assistant", "content": "It is \\boxed{2}."}
DEVELOPER = {"role": "developer", "content": "Be brief."}


@pytest.mark.parametrize(
    ("name", "separator"),
    [
        ("rows.csv", ","),
        ("rows.csv", ";"),
        ("rows.tsv", "\t"),
        ("rows.csv.gz", ","),
        ("rows.csv.gz", ";"),
        ("rows.tsv.gz", "\t"),
    ],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_table_s_rows_are_exact_problems(
    tmp_path: Path, name: str, separator: str, line_end: str
) -> None:
    """With a byte order mark, quoted line ends and quotes, a blank line, and a nameless index."""
    content = TABLE.replace("|", separator).replace("\n", line_end).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    read = load_problems(str(path))
    first, *others = read.problems
    assert first.text.replace("\r\n", "\n") == PROBLEMS[0].text
    assert tuple(others) == PROBLEMS[1:] and read.bad_rows == ()
    assert (first.id, first.answer, first.row) == ("a", "42", 1)
    own = load_problems(str(path), with_fields=True).problems[0]
    assert own.fields == {"id": "a", "answer": "42", "level": "3"}
    assert csv.field_size_limit() < 200_000


def test_blank_lines_before_a_table_do_not_hide_its_semicolons(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n\nproblem;answer\np;1,5\n")
    (problem,) = load_problems(str(path)).problems
    assert (problem.text, problem.answer) == ("p", "1,5")


def test_a_comma_outside_of_quotes_in_the_header_decides_for_commas(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('"problem";"answer, short";answer\n"a; b, c";x,y;"1,5"\n')
    (problem,) = load_problems(str(path), with_fields=True).problems
    assert (problem.text, problem.answer) == ("a; b, c", "1,5")
    assert problem.fields["answer, short"] == "x,y"
    path.write_text('"problem","a;b",answer\np;q,x,1\n')
    (problem,) = load_problems(str(path), with_fields=True).problems
    assert (problem.text, problem.answer, problem.fields["a;b"]) == ("p;q", "1", "x")


@pytest.mark.parametrize("ending", ["json", "json.gz"])
@pytest.mark.parametrize("key", [None, "data", "rows"])
def test_a_json_list_equals_the_same_lines(tmp_path: Path, ending: str, key: str | None) -> None:
    rows: list[Any] = [{"id": 7, "problem": "π?", "answer": 3.5}, {"problem": "q", "answer": "1"}]
    expected = load_problems(write_rows(tmp_path / "rows.jsonl", rows))
    whole = rows if key is None else {"version": "1", "meta": {"a": 1}, key: rows}
    content = b"\xef\xbb\xbf" + json.dumps(whole, ensure_ascii=False).encode()
    path = tmp_path / f"rows.{ending}"
    path.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    read = load_problems(str(path))
    assert (read.problems, read.sha256) == (expected.problems, expected.sha256)


def test_bad_rows_have_their_number_and_the_others_are_kept(tmp_path: Path) -> None:
    table = b'problem,answer\n1+1?,2\n"a\nb",1,more\nr\np,\np,3\n'
    path = tmp_path / "rows.csv"
    path.write_bytes(table)
    read = load_problems(str(path))
    assert [(problem.row, problem.answer) for problem in read.problems] == [(1, "2"), (5, "3")]
    separators = "put quotes around a value with separators in it"
    assert [(bad.row, bad.reason) for bad in read.bad_rows] == [
        (2, f"it has 3 values, and the header 2 names; {separators}"),
        (3, f"it has 1 values, and the header 2 names; {separators}"),
        (4, "answer is empty"),
    ]
    assert read.bad_rows[2].place == f"{path}, row 4"  # it is line 6 of the file
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"problem": "p", "answer": 1}, 5, {"problem": "p"}, ["p"]]))
    read = load_problems(str(path))
    assert [(bad.row, bad.reason) for bad in read.bad_rows] == [
        (2, "a JSON int, not an object"),
        (3, "no answer"),
        (4, "a JSON list, not an object"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("r.csv", 'problem,answer\n"a\nb",1\n"c"d,2\n', "row that begins in line 4 has a quote"),
        ("r.csv", 'problem,answer\np,1\n"q,2\nr,3\n', "row that begins in line 3 has a quote"),
        ("r.csv", "problem\tanswer\np\t1\n", "the header .* is one column; .csv means commas or"),
        ("r.csv", "problem;answer,id\np;1,2\n", "it has id, problem;answer: set data.pro"),
        (
            "r.csv",
            "What is 7?,42\np,1\n",
            "has 42, What is 7.: set data.*; the first line was taken as",
        ),
        ("r.csv", '"problem;answer"\np\n', "the header 'problem;answer' is one column"),
        ("r.tsv", "problem;answer\np;1\n", "the header 'problem;answer' is one column"),
        ("r.tsv", "problem,answer\np,1\n", "the header 'problem,answer' is one column"),
        ("r.csv", "problem,answer,answer\np,1,2\n", "the header has 'answer' 2 times; rename one"),
        ("r.csv", "text,target\np,1\n", r"no field problem.*; it has target, text: set data.pro"),
        ("r.csv", "problem,answer\n", "is empty: it has no rows"),
        ("r.csv.gz", "problem,answer\n", "is damaged or not a gzip file"),
        ("r.json.gz", "[]", "is damaged or not a gzip file"),
        ("r.json", '{"problem": "p"}\n{"problem": "q"}', "is not JSON: Extra data.*named .jsonl"),
        ("r.json", "[" * 100_000, "is not JSON: nested too deeply"),
        ("r.json", '"p"', "is a JSON str; write a list of objects"),
        ("r.json", '{"train": [{}], "test": [{}]}', "is an object with train, test, and which"),
        ("r.json", '{"problem": "p", "choices": ["1"]}', "is an object with problem, choices"),
        ("r.json", "{}", "is an object with nothing"),
        ("r.json", "[]", "is empty: it has no rows"),
        ("missing.json", None, "there is no file"),
        ("missing.tsv.gz", None, "there is no file"),
    ],
)
def test_files_that_cannot_be_read_are_one_line(
    tmp_path: Path, name: str, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"^data[^\n]*{said}[^\n]*$"):
        load_problems(str(tmp_path / name))


ENCODINGS = {
    "utf-16": (1, "0xff, perhaps of UTF-16; .* iconv -f UTF-16 -t UTF-8"),
    "latin-1": (102, "0xe9, perhaps of Latin-1 or .* iconv -f WINDOWS-1252 -t UTF-8"),
}


@pytest.mark.parametrize("name", ["r.csv", "r.csv.gz", "r.json", "r.jsonl", "r.tsv"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_file_in_another_encoding_is_refused_with_its_name(
    tmp_path: Path, name: str, encoding: str
) -> None:
    """Whole, also if only rows behind the first hundred are not ASCII."""
    line, said = ENCODINGS[encoding]
    rows = ["p,1"] * 100 + ["é,2"] * 10
    header = "problem\tanswer" if name == "r.tsv" else "problem,answer"
    text = "\n".join([header, *rows])
    if "json" in name:
        text = text.replace("p,1", "{}")
    if name == "r.tsv":
        text = text.replace(",", "\t")
    open_text = gzip.open if name.endswith("gz") else open
    with open_text(tmp_path / name, "wt", encoding=encoding) as file:
        file.write(text)
    message = rf"^data.train: [^\n]*{name} is not UTF-8: line {line} has the byte {said}$"
    with pytest.raises(UserError, match=message):
        load_problems(str(tmp_path / name))


@pytest.mark.parametrize("name", ["r.csv", "r.jsonl", "r.tsv"])
def test_a_few_rows_that_are_not_utf_8_are_bad_rows(tmp_path: Path, name: str) -> None:
    """Nine, whatever their share, and fewer than one in twenty."""
    for num_good, num_bad, is_refused in ((3, 9, False), (3, 10, True), (400, 20, False)):
        rows = [{"problem": "p", "answer": "1"}] * num_good
        rows += [{"problem": "é", "answer": "2"}] * num_bad
        with (tmp_path / name).open("w", encoding="latin-1", newline="") as file:
            if name == "r.jsonl":
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            else:
                table = csv.DictWriter(file, rows[0], delimiter="\t" if name == "r.tsv" else ",")
                table.writeheader()
                table.writerows(rows)
        if is_refused:
            with pytest.raises(UserError, match="is not UTF-8: line"):
                load_problems(str(tmp_path / name))
            continue
        read = load_problems(str(tmp_path / name))
        assert len(read.problems) == num_good
        reasons = [bad.reason for bad in read.bad_rows]
        assert reasons == ["not UTF-8; convert the file, for example with iconv"] * num_bad


def test_the_answer_of_an_openai_chat_is_its_last_turn(tmp_path: Path) -> None:
    """Its gold answer is what the text marks; content may be a list of parts."""
    system = {"role": "system", "content": "Be brief."}
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    again = {"role": "user", "content": parts}
    steps = {"role": "assistant", "content": "2 and 2.\n#### 4,000"}
    plain = {"role": "assistant", "content": [{"type": "text", "text": " 2 "}]}
    chats = [[system, USER, RIGHT], [USER, RIGHT, again, steps], [USER, plain]]
    rows = [{"messages": chat} for chat in chats]
    expected = (
        Problem(
            id="row-1", text="1+1?", answer="2", before=(Message("system", "Be brief."),), row=1
        ),
        Problem(
            id="row-2",
            text="2+2?",
            answer="4000",
            before=(Message("user", "1+1?"), Message("assistant", "It is \\boxed{2}.")),
            row=2,
        ),
        Problem(id="row-3", text="1+1?", answer="2", row=3),
    )
    source = write_rows(tmp_path / "rows.jsonl", rows)
    assert load_problems(source).problems == expected
    named = {"problem_field": "messages", "answer_field": "messages"}
    assert load_problems(source, **named).problems == expected
    with (tmp_path / "rows.csv").open("w", newline="") as file:  # the chats as JSON text
        csv.writer(file).writerows([["messages"], *([json.dumps(chat)] for chat in chats)])
    assert load_problems(str(tmp_path / "rows.csv")).problems == expected
    own = load_problems(
        write_rows(tmp_path / "more.jsonl", [rows[0] | {"level": 1}]), with_fields=True
    )
    assert own.problems[0].fields == {"level": 1}


def test_chats_without_an_answer_are_bad_rows(tmp_path: Path) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}
    calls = {"role": "assistant", "content": None, "tool_calls": []}
    chats: list[Any] = [[USER], [USER, calls], [RIGHT], [image, RIGHT], "1+1?", [], [USER, RIGHT]]
    chats += [[USER, {"role": "assistant", "content": "\\boxed{"}], [USER, RIGHT, RIGHT]]
    read = load_problems(write_rows(tmp_path / "r.jsonl", [{"messages": c} for c in chats]))
    assert [problem.row for problem in read.problems] == [7]
    assert [(bad.row, bad.reason.partition(":")[0]) for bad in read.bad_rows] == [
        (1, "messages is not a chat that ends with the assistant's answer"),
        (2, "messages"),
        (3, "messages is not a chat"),
        (4, "messages is not a chat"),
        (5, "messages is not a chat that ends with the assistant's answer"),
        (6, "messages is not a chat that ends with the assistant's answer"),
        (8, "messages has a last \\boxed{ that is empty or never closed"),
        (9, "messages is not a chat"),
    ]
    assert read.bad_rows[1].reason == "messages: the assistant's answer is not text"


def test_sharegpt_s_chats_are_read_as_openai_s(tmp_path: Path) -> None:
    """Its field is found where no usual one is; the keys may name it, or another column of it."""
    chats = [[DEVELOPER, USER, RIGHT], [USER, RIGHT, USER, RIGHT], [USER]]
    names = {"developer": "system", "user": "human", "assistant": "gpt"}
    exported = []
    for chat in chats:
        exported.append([{"from": names[m["role"]], "value": m["content"]} for m in chat])
    expected = load_problems(
        write_rows(tmp_path / "r.jsonl", [{"messages": chat} for chat in chats])
    )
    assert expected.problems[0].before == (Message("system", "Be brief."),)
    rows = [{"id": 7, "conversations": chat} for chat in exported]
    source = write_rows(tmp_path / "s.jsonl", rows)
    read = load_problems(source)
    assert [p.id for p in read.problems] == ["7", "7-2"]
    for one, other in zip(read.problems, expected.problems, strict=True):
        assert (one.text, one.answer, one.before) == (other.text, other.answer, other.before)
    assert [bad.reason for bad in read.bad_rows] == [
        "conversations is not a chat that ends with the assistant's answer: write that last, with "
        "role and content, or from and value"
    ]
    named = {"problem_field": "dialogue", "answer_field": "dialogue"}
    (tmp_path / "t.csv").write_text("")
    with (tmp_path / "t.csv").open("w", newline="") as file:  # as JSON text
        csv.writer(file).writerows([["dialogue"], *([json.dumps(chat)] for chat in exported)])
    table = load_problems(str(tmp_path / "t.csv"), **named)
    assert [p.text for p in table.problems] == ["1+1?", "1+1?"]
    both = [rows[0] | {"problem": "2+2?", "answer": "4"}, rows[1]]  # as it was before
    read = load_problems(write_rows(tmp_path / "u.jsonl", both))
    assert [(p.text, p.answer) for p in read.problems] == [("2+2?", "4")]


def test_trl_s_prompts_and_completions_are_lists_of_messages(tmp_path: Path) -> None:
    fields = {"problem_field": "prompt", "answer_field": "completion"}
    pairs: list[Any] = [
        ([DEVELOPER, USER], [RIGHT]),
        ("2+2?", [{"role": "assistant", "content": "#### 4"}]),
        ([USER], "\\boxed{2}"),
        ([USER], [RIGHT, USER]),
        ([USER], [USER]),
    ]
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    read = load_problems(write_rows(tmp_path / "r.jsonl", rows), **fields)
    assert [(p.text, p.answer, len(p.before)) for p in read.problems] == [
        ("1+1?", "2", 1),
        ("2+2?", "4", 0),
        ("1+1?", "2", 0),
    ]
    said = "completion is a chat: write one message of the assistant's, with text as its content"
    assert [bad.reason.partition(";")[0] for bad in read.bad_rows] == [said] * 2


def test_an_element_of_a_list_and_a_decimal_of_parquet_are_gold_answers(tmp_path: Path) -> None:
    rows = [{"problem": "p", "answer": ["15", "16"], "price": Decimal("2.50")}]
    path = str(tmp_path / "r.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    for field, gold in (("answer.0", "15"), ("answer.1", "16"), ("price", "2.5")):
        assert [p.answer for p in load_problems(path, answer_field=field).problems] == [gold]
    with pytest.raises(UserError, match=r"answer is of type list.*name one, such as answer\.0\)$"):
        load_problems(path)
    with pytest.raises(UserError, match="has no field answer.2; it has answer, price, problem"):
        load_problems(path, answer_field="answer.2")


def test_columns_beside_the_chats_decide_or_are_asked_for(tmp_path: Path) -> None:
    chat = {"messages": [USER, RIGHT]}
    both = {"problem": "2+2?", "answer": "4"}
    source = write_rows(tmp_path / "r.jsonl", [both | chat])
    assert [(p.text, p.answer) for p in load_problems(source).problems] == [("2+2?", "4")]
    source = write_rows(tmp_path / "r.jsonl", [chat, chat, both])  # most rows have chats
    assert [p.text for p in load_problems(source).problems] == ["1+1?", "1+1?"]
    source = write_rows(tmp_path / "r.jsonl", [chat | {"prompt": "1+1?"}])
    with pytest.raises(UserError, match="data.answer_field: .* has no field answer .*messages"):
        load_problems(source)
    source = write_rows(tmp_path / "r.jsonl", [{"messages": [USER], "answer": "2"}])
    with pytest.raises(UserError, match="data.problem_field: .* no field problem .*messages"):
        load_problems(source)
    assert load_problems(source, problem_field="messages").problems[0].answer == "2"


def test_a_benchmark_is_a_table_or_a_list_and_must_be_whole(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer\n1+1?,2\n")
    (tmp_path / "b.json").write_text(json.dumps([{"messages": [USER, RIGHT]}]))
    data = {name: str(tmp_path / name) for name in ("a.csv", "b.json")}
    settings = EvalSettings(model="m", out=tmp_path / "out", data=data)
    read = load_benchmarks(settings, is_tiny_reasoner=True)
    assert [(b.problems[0].text, b.problems[0].answer) for b in read] == [("1+1?", "2")] * 2
    (tmp_path / "a.csv").write_text("question,answer\n1+1?,2\nq\n")
    with pytest.raises(UserError, match=r"benchmark a.csv: .*a\.csv, row 2: it has 1 values"):
        load_benchmarks(settings, is_tiny_reasoner=True)


def test_a_run_trains_on_a_table_and_evaluates_on_chats(cli: ForkedCli, tmp_path: Path) -> None:
    """Its numbers are those of a run on the same problems as JSON lines."""
    sums = [(f"What is {a}+{b}?", str(a + b)) for a in range(4) for b in range(4)]
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("problem", "answer"), *sums[:12]])
    lines = [{"problem": problem, "answer": answer} for problem, answer in sums]
    write_rows(tmp_path / "train.jsonl", lines[:12])
    write_rows(tmp_path / "test.jsonl", lines[12:])
    chats = [
        {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": a}]}
        for p, a in sums[12:]
    ]
    (tmp_path / "test.json").write_text(json.dumps({"data": chats}))
    written = []
    for name, train, test in (
        ("table", "train.csv", "test.json"),
        ("lines", "train.jsonl", "test.jsonl"),
    ):
        keys = [f"data.train={tmp_path / train}", f"eval.data={tmp_path / test}", "run.steps=1"]
        ended = cli.run(["train", QUICKSTART, *SMALL_RUN, *keys, f"run.dir={tmp_path / name}"])
        assert ended.exit_code == 0, ended.stderr
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())["identity"]
        model = (tmp_path / name / "hf/model.safetensors").read_bytes()
        written.append((manifest["data_sha256"], model))
    assert written[0] == written[1]
