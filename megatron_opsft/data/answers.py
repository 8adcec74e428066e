"""Gold answers as data sets write them: numbers, LaTeX, `#### 42`, solutions with a box."""

import math
import re

from megatron_opsft.data.boxed import find_boxes
from megatron_opsft.errors import RowError

_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
SOLUTION_FIELD = "solution"


def read_answer(value: object, field: str) -> str:
    """The gold answer in a field's value, as the verifier takes it.

    Text with `####` gives what follows the last of them; else text with boxes the last box; else
    the text itself, unless the field is a worked `solution`, which must mark its answer. `1,234`
    becomes `1234`. Numbers become text. Raises RowError for anything else: null, booleans,
    lists, blank text, NaN.
    """
    if value is None:
        raise RowError(f"no {field}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"{field} is of type {type(value).__name__}, not text or a number")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RowError(f"{field} is {value}")
        return str(int(value)) if value.is_integer() else str(value)
    answer = _marked_answer(str(value), field).strip()
    if not answer:
        raise RowError(f"{field} is empty")
    return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer


def _marked_answer(text: str, field: str) -> str:
    _, marker, behind = text.rpartition("####")
    if marker:
        return behind
    boxes = find_boxes(text)
    if boxes:
        return boxes[-1].content
    if field.rpartition(".")[2] == SOLUTION_FIELD and text.strip():
        raise RowError(f"{field} has neither \\boxed{{...}} nor ####")
    return text
