"""What a gold answer's field says, and which boxes of a text belong to its answer."""

from decimal import Decimal
from typing import Any

import pytest

from megatron_opsft.data.answers import final_boxes, find_boxes, last_box, read_answer
from megatron_opsft.errors import RowError

READ = [
    (7, "7"),
    (2.0, "2"),
    (-3, "-3"),
    (0.000025, "0.000025"),
    (1.5e-7, "0.00000015"),
    (Decimal("15.00"), "15"),
    (Decimal("-0.00"), "0"),
    (Decimal("1E+3"), "1000"),
    (Decimal("0.250"), "0.25"),
    (Decimal("12345678901234567890123456789012345.60"), "12345678901234567890123456789012345.6"),
    (["15"], "15"),
    ([2.5], "2.5"),
    (" 4 ", "4"),
    ("1,234.5", "1234.5"),
    ("(1,234)", "(1,234)"),
    ("So \\fbox{7}.", "7"),
    ("So \\boxed{42}.\n\n#### Check\n", "42"),
    ("Two and two <<2+2=4>>4.\n#### 4,321", "4321"),
    ("#### Step 1\n2 + 2 = 4\n#### 4", "4"),
    ("$x = \\boxed{1}$ or $x = \\boxed{-2}$", "1, -2"),
]
NO_TEXT = ", not text or a number"
REFUSED = [
    (True, "answer is of type bool, not text or a number"),
    (None, "no answer"),
    ([], "answer is of type list, not text or a number"),
    ([None], "no answer"),
    (["1", "2"], f"answer is of type list{NO_TEXT}; it holds 2 values: name one, such as answer.0"),
    (
        {"value": 1},
        f"answer is of type dict{NO_TEXT}; it has value: name one, such as answer.value",
    ),
    (Decimal("NaN"), "answer is NaN"),
    (float("nan"), "answer is nan"),
    ("  ", "answer is empty"),
    ("\\boxed{3}, then \\boxed{12", "answer has a last \\boxed{ that is empty or never closed"),
    ("\\boxed{}", "answer has a last \\boxed{ that is empty or never closed"),
    ("#### Check\nIt fits.\n", "answer has no answer behind its last ####, on the last line"),
]


@pytest.mark.parametrize(("value", "answer"), READ)
def test_an_answer_is_what_its_text_marks(value: Any, answer: str) -> None:
    assert read_answer(value, "answer") == answer


@pytest.mark.parametrize(("value", "reason"), REFUSED)
def test_what_is_no_answer_is_a_bad_row(value: Any, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        read_answer(value, "answer")
    assert str(caught.value) == reason


def test_a_worked_solution_must_mark_its_answer() -> None:
    """In a field of that name, also one inside of another."""
    assert read_answer("So it is \\boxed{4}.", "solution") == "4"
    for field in ("solution", "extra.solution", "solution.0"):
        with pytest.raises(RowError, match="has neither"):
            read_answer("So it is 4.", field)
    assert read_answer("So it is 4.", "solution.answer") == "So it is 4."


def test_boxes_are_closed_where_tex_closes_them() -> None:
    text = r"\boxed{1}, \boxed {\frac{1}{2}} and \fbox{a \} b}; \boxed7 \boxed\frac12 \boxed{{}"
    contents = ["1", r"\frac{1}{2}", r"a \} b", "7", r"\frac12"]
    assert [box.content for box in find_boxes(text)] == contents
    never_closed = last_box(text)
    assert never_closed is not None and never_closed.content == ""
    assert last_box("none") is None
    assert final_boxes(r"\boxed{9}. So \boxed{1}, \boxed{2} and \boxed{3}.") == ["1", "2", "3"]
