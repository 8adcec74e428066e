"""Judges one answer with math-verify: the only file that imports it.

Runs inside a worker process of `worker_pool`, which holds the time limit: math-verify's own limit
works by `signal.alarm` and is off here. Imports no torch, so that a worker starts in well under a
second.

What counts as the answer: of the text behind the last `</think>` (all of it where there is none)
the last `\\boxed{...}` with those joined to it by "and", "or" or a comma. Without a box, or when
"the final answer is" comes after it, math-verify looks for an answer in the prose, as its `parse`
always does.
"""

import logging
import re
from functools import lru_cache
from typing import Any

import sympy.core.random
from math_verify import parse, verify

from megatron_opsft.data.boxed import find_boxes
from megatron_opsft.records import Outcome, Verdict
from megatron_opsft.verify.answer import behind_thinking, make_verdict

_JOIN = re.compile(
    r"(?:[\s,;&$]|\\[()\[\],;:! ]|\\q?quad|\\text\{[^{}]*\b(?:and|or)\b[^{}]*\}|\b(?:and|or)\b"
    r"|[A-Za-z](?:_\{?\w+\}?)?\s*=)*"
)
_FINAL_ANSWER = re.compile(r"final answer[^\n]{0,100}?\bis\b", re.IGNORECASE)
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:[ ,]\d{3})+|\d*)(?:\.\d+)?\s*%?")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_MATHS_MARKS = re.compile(r"(?<!\\)\$.+(?<!\\)\$|\\\(|\\\[|\\boxed", re.DOTALL)
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s\-][^\W\d_]+)*")
_BRACKETED = re.compile(r"\[([^\[\]\n]+)\](?!\()")

# math-verify warns at every first use that its limit is off; the pool's limit is why.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def judge(response_text: str, gold: str) -> Verdict:
    """Compare the answer of a response with the gold answer (LaTeX, a number, or text with maths
    in $...$).

    Never gives TIMEOUT or UNFINISHED. The same pair always gets the same verdict: sympy's random
    probes are seeded anew for each answer. What sympy cannot compare is WRONG; an exception
    becomes ERROR, but for MemoryError.
    """
    try:
        return _judge(response_text, gold.strip())
    except MemoryError:  # perhaps of earlier answers: another process judges this one
        raise
    except Exception as error:  # foreign output is judged here: whatever it breaks is its outcome
        return make_verdict(Outcome.ERROR, f"{type(error).__name__}: {error}")


def _judge(response_text: str, gold: str) -> Verdict:
    tail = behind_thinking(response_text)
    boxes, boxes_end = _last_boxes(tail)
    in_boxes = bool(boxes) and not _FINAL_ANSWER.search(tail, boxes_end)
    answer = ", ".join(boxes) if in_boxes else tail.strip()
    if _same_text(answer, gold):
        return make_verdict(Outcome.CORRECT, answer)
    gold_values = list(_parse_gold(gold))
    sympy.core.random.seed(0)  # after the gold answer, whose parse may come from the cache
    if in_boxes:
        parsed = _parse(" and ".join(f"\\boxed{{{box}}}" for box in boxes))
    else:
        parsed = _parse(tail) or _parse_brackets(tail)
        answer = str(parsed[-1]) if parsed else ""
    if verify(gold_values, parsed, timeout_seconds=None):
        return make_verdict(Outcome.CORRECT, answer)
    return make_verdict(Outcome.WRONG if answer else Outcome.NO_ANSWER, answer)


def _parse(text: str) -> list[Any]:
    """What math-verify reads: a sympy expression and the string it was read from, or []."""
    return parse(text, parsing_timeout=None)


def _parse_brackets(text: str) -> list[Any]:
    """The last `[...]`: math-verify sees one between spaces only, not before a full stop."""
    found = _BRACKETED.findall(text)
    return _parse(f"${found[-1]}$") if found else []


@lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> tuple[Any, ...]:
    """Read a gold answer as the whole of what it says.

    Without $ around it math-verify reads bare LaTeX as prose and takes the first number of `4a-2`
    or `7\\pi` for the answer; so whatever is not a plain number or already marked as maths is
    read as one formula, and as prose only when that fails.
    """
    if gold.startswith("$") and gold.count("$") == 1:
        gold = gold[1:]  # a price
    as_formula = f"\\boxed{{{gold}}}"
    marked = _MATHS_MARKS.search(gold) or _PLAIN_NUMBER.fullmatch(gold)
    if _DECIMAL_COMMA.fullmatch(gold) and not marked:
        return (*_parse(gold), *_parse(as_formula))  # 1,22 is a number to some and a list to others
    first, second = (gold, as_formula) if marked else (as_formula, gold)
    reading = _parse(first)
    if not _has_value(reading):
        second_reading = _parse(second)
        if _has_value(second_reading) or not reading:
            reading = second_reading
    return tuple(reading)


def _has_value(reading: list[Any]) -> bool:
    """Whether math-verify made a sympy object of it, not just cut out a string."""
    return any(not isinstance(value, str) for value in reading)


def _last_boxes(text: str) -> tuple[list[str], int]:
    """Contents of the last box and those joined to it, in order; and where the last one ends."""
    found = find_boxes(text)
    contents: list[str] = []
    next_start = len(text)
    for box in reversed(found):
        if contents and not _JOIN.fullmatch(text, box.end, next_start):
            break
        if box.content not in contents:
            contents.insert(0, box.content)
        next_start = box.start
    return contents, found[-1].end if found else 0


def _same_text(answer: str, gold: str) -> bool:
    """Equal but for spaces and text wrappers; words also but for case (`\\text{Yes}`, `yes`)."""
    left, right = _plain_text(answer), _plain_text(gold)
    if _WORDS.fullmatch(left) and _WORDS.fullmatch(right):
        left, right = left.casefold(), right.casefold()
    return bool(left) and left == right


def _plain_text(text: str) -> str:
    text = _WRAPPER.sub(r"\1", text.strip().strip("$").strip())
    return " ".join(text.split()).rstrip(".")
