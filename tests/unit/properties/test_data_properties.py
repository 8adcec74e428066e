"""Any row gives a problem or a bad row with a reason of one line; boxes are what TeX would take."""

import json
import re
import tempfile
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from megatron_opsft.data.answers import find_boxes, read_answer
from megatron_opsft.data.problems import load_problems
from megatron_opsft.data.rows import ANSWER_FIELDS, ID_FIELDS, PROBLEM_FIELDS
from megatron_opsft.errors import RowError

TEXT = st.text(st.characters(), max_size=12)  # lone surrogates as well
LATEX = st.lists(
    st.sampled_from(["\\boxed", "\\boxed{", "{", "}", "\\", "\\{", "\\}", " ", "4", "#### ", "é"]),
    max_size=14,
).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | LATEX,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
ROWS = st.dictionaries(
    st.sampled_from([*PROBLEM_FIELDS, *ANSWER_FIELDS, *ID_FIELDS]) | TEXT, VALUES, max_size=5
)
GOOD = {"problem": "1 + 1?", "answer": "2"}
LINES = st.one_of(
    ROWS.map(lambda row: json.dumps(row).encode()),
    ROWS.map(lambda row: json.dumps(GOOD | row).encode()),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=20),
).map(lambda line: line.replace(b"\n", b" "))


@given(st.lists(LINES, max_size=6))
@example([b"[" * 3000, b"1" * 5000, b'{"problem": "p", "answer": ' + b"1" * 4000 + b"}"])
@example([b'\xef\xbb\xbf{"problem": "p", "answer": 1e308}', b"\xff\xfe{\0}\0"])
def test_every_row_is_a_problem_or_a_bad_row(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "rows.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in [*lines, json.dumps(GOOD).encode()]))
        found = load_problems(str(path), problem_field="problem", answer_field="answer")
    numbers = [*(problem.row for problem in found.problems), *(bad.row for bad in found.bad_rows)]
    rows = [n for n, line in enumerate(lines, start=1) if line.strip()]
    assert sorted(numbers) == [*rows, len(lines) + 1]
    assert len({problem.id for problem in found.problems}) == len(found.problems)
    for problem in found.problems:
        assert problem.text.strip() and problem.answer == problem.answer.strip() != ""
        f"{problem.id}{problem.text}{problem.answer}".encode()
    for bad in found.bad_rows:
        assert bad.reason and "\n" not in bad.reason


@given(VALUES)
def test_an_answer_is_text_that_stays_itself(value: object) -> None:
    try:
        answer = read_answer(value, "answer")
    except RowError as error:
        assert "\n" not in str(error)
        return
    assert answer and answer == answer.strip()
    if isinstance(value, int | float):
        assert float(answer) == float(value) and read_answer(answer, "answer") == answer


@given(LATEX)
@example("\\boxed{a\\\\}")
@example("\\boxed 4")
def test_boxes_are_outermost_balanced_and_in_order(text: str) -> None:
    end = 0
    for box in find_boxes(text):
        assert end <= box.start < box.end <= len(text)
        end = box.end
        whole = text[box.start : box.end]
        inside = re.fullmatch(r"\\boxed\s*(?:\{(.*)\}|(\d+))", whole, re.DOTALL)
        assert inside and box.content == (inside[1] or inside[2]).strip() != ""
        bare = re.sub(r"\\[\\{}]", "", box.content)
        assert bare.count("{") == bare.count("}")
