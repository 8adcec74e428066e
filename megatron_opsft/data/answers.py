"""Gold answers as data sets write them: numbers, LaTeX, `#### 42`, solutions with a box."""

import math
import re
from decimal import Decimal

from megatron_opsft.data.boxed import final_boxes, last_box
from megatron_opsft.errors import RowError

_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_LAST_LINE = re.compile(r"####[ \t]*(\S[^\n]*?)\s*\Z")
SOLUTION_FIELD = "solution"


def read_answer(value: object, field: str) -> str:
    """The gold answer in a field's value, as the verifier takes it.

    Text with boxes gives the last box, with those joined to it by "and", "or" or a comma; else
    what follows `####` on the last line; else the text itself, unless the field is a worked
    `solution`, which must mark its answer. `1,234` becomes `1234`. Numbers become text without an
    exponent. Raises RowError for anything else: null, booleans, lists, blank text, NaN, a last box
    that is empty or never closed, and `####` with more than a line behind it.
    """
    if value is None:
        raise RowError(f"no {field}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"{field} is of type {type(value).__name__}, not text or a number")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RowError(f"{field} is {value}")
        number = Decimal(repr(value))
        return str(int(number)) if value.is_integer() else f"{number:f}"
    answer = _marked_answer(str(value), field).strip()
    if not answer:
        raise RowError(f"{field} is empty")
    return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer


def _marked_answer(text: str, field: str) -> str:
    if box := last_box(text):
        if not box.content:
            raise RowError(f"{field} has a last \\boxed{{ that is empty or never closed")
        return ", ".join(final_boxes(text))
    if match := _LAST_LINE.search(text):
        return match[1]
    if "####" in text:
        raise RowError(f"{field} has no answer behind its last ####, on the last line")
    if field.rpartition(".")[2] == SOLUTION_FIELD and text.strip():
        raise RowError(f"{field} has neither \\boxed{{...}} nor ####")
    return text
