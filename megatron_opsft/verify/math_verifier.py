"""The judge of mathematics: it compares the answer of a response with the gold answer.

Runs inside a worker process of `worker_pool`, which holds the time limit: math-verify's own limit
works by `signal.alarm` and is off here. Imports no torch, so that a worker starts in well under a
second.

A verdict takes four steps, each in a file of its own. An answer that is not understood as a whole
is wrong.

1. `final_answer` finds the text that is the answer: a box, a statement, or a sentence.
2. `spelling` writes it in the one spelling that is read; the gold answer goes through it, too
   (`layout` holds the LaTeX half of its table).
3. `reading` takes it apart: option letter, value, unit (`units`), condition (`conditions`), time or
   numeral (`numerals`).
4. `comparison` compares it with the gold. If the value is mathematics, `parsing` reads it and
   `equality` compares it, with `names` (x = 5), `decimals`, `formulas` and `values`.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, product

import sympy.core.random

from megatron_opsft.data.answers import final_boxes, last_box, read_answer
from megatron_opsft.records import Outcome, Verdict
from megatron_opsft.verify.comparison import is_understood, same_answer
from megatron_opsft.verify.final_answer import find_answers, only_line
from megatron_opsft.verify.reading import Answer, is_words, read

_ALTERNATIVES = re.compile(r"\\text\s*\{\s*OR\s*\}")
_WHOLE_EXPONENT = re.compile(r"(-?\d+)e(-?\d)")
_ALL_EQUAL = re.compile(r"[a-z]\s*(?:=\s*[a-z]\s*)+=([^=a-z]+)")
_DECIMAL_COMMA = re.compile(r"([+-]?\d+),(\d+)")
# math-verify warns at every first use that its limit is off; the pool's limit is why.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def judge(response_text: str, gold: str | float) -> Verdict:
    """Compare the answer of a response with the gold answer (LaTeX, a number, or text with maths
    in $...$).

    The same pair always gets the same verdict: sympy's random probes are seeded anew for each
    answer. What sympy cannot compare is WRONG. Errors: `RowError` for a gold that is neither text
    nor a number; whatever sympy raises.
    """
    if not isinstance(gold, str):  # a number of JSON
        gold = read_answer(gold, "gold")
    candidates = tuple(find_answers(response_text))
    return _judge_candidates(candidates, only_line(response_text), gold.strip())


def is_right(value: str, gold: str) -> bool:
    """True if a value that a response states is the gold answer."""
    verdict = _judge_candidates((value,), "", gold.strip())
    return verdict.outcome is Outcome.CORRECT


@lru_cache(maxsize=4096)
def _judge_candidates(candidates: tuple[str, ...], line: str, gold: str) -> Verdict:
    """Compare what may be the answer, or a response of one line, with the gold answer."""
    sympy.core.random.seed(0)
    for read_gold in (_read_gold, _read_gold_sentence):
        golds = read_gold(gold)
        verdict = _compare(candidates, golds)
        if verdict.outcome is Outcome.CORRECT:
            return verdict
        if line:
            verdict_of_line = _compare([line], golds)
            if verdict_of_line.outcome is Outcome.CORRECT:
                return verdict_of_line
    return verdict


def _compare(candidates: Sequence[str], golds: Sequence[Answer]) -> Verdict:
    """Return CORRECT if a candidate is a gold answer. They are tried in order, up to the first that
    is understood as more than words: if that one differs from the golds, the verdict is WRONG.
    """
    for candidate in candidates:
        answers = _read_answer(candidate)
        if any(same_answer(gold, answer) for gold, answer in product(golds, answers)):
            return Verdict(outcome=Outcome.CORRECT, answer=candidate)
        for answer in answers:
            if is_understood(answer) and not is_words(answer.body):
                return Verdict(outcome=Outcome.WRONG, answer=candidate)
    if not candidates:
        return Verdict(outcome=Outcome.NO_ANSWER)
    return Verdict(outcome=Outcome.WRONG, answer=candidates[0])


@lru_cache(maxsize=4096)
def _read_gold(gold: str) -> tuple[Answer, ...]:
    """Return the right answers: several if the gold says OR, or can be read in two ways."""
    box = last_box(gold)
    if boxes := final_boxes(gold):
        gold = ", ".join(boxes)
    elif box and box.end < 0:  # never closed: all that follows is the answer
        gold = gold[gold.index("{", box.start) + 1 :]
    # Without OR there is one text, and it is read once.
    return _read_all(dict.fromkeys([gold, *_ALTERNATIVES.split(gold)]))


@lru_cache(maxsize=4096)
def _read_gold_sentence(gold: str) -> tuple[Answer, ...]:
    """Return the answers in a gold that is a sentence or more, and cannot be read as one answer."""
    if any(map(is_understood, _read_gold(gold))):
        return ()
    right_side = gold.rpartition("=")[2]
    texts = [*find_answers(gold), right_side]
    return _read_all(text for text in texts if text)


def _read_all(texts: Iterable[str]) -> tuple[Answer, ...]:
    """Return the readings of all texts, in order."""
    return tuple(chain.from_iterable(map(_read, texts)))


def _read(text: str) -> list[Answer]:
    """Return the readings of one text."""
    answer = read(text)
    # 2e8 is a number with a power of ten; 2e-8 may also be a difference with Euler's number.
    if match := _WHOLE_EXPONENT.fullmatch(answer.body):
        power = _with_body(answer, rf"{match[1]}\cdot 10^{{{match[2]}}}")
        return [power] if match[2].isdecimal() else [answer, power]
    if match := _ALL_EQUAL.fullmatch(answer.body):  # x = y = 1 is (1, 1)
        values = ", ".join([match[1]] * match[0].count("="))
        return [answer, _with_body(answer, f"({values})")]
    return [answer]


def _read_answer(text: str) -> list[Answer]:
    """Return the readings of a response's answer. Some write 1,22 for a number; in a gold the comma
    separates two.
    """
    readings = _read(text)
    if match := _DECIMAL_COMMA.fullmatch(readings[0].body):
        readings.append(_with_body(readings[0], f"{match[1]}.{match[2]}"))
    return readings


def _with_body(answer: Answer, body: str) -> Answer:
    """Return the answer with its value written otherwise; unit, condition and option stay."""
    return answer._replace(text=body, body=body)


def forget_golds() -> None:
    """Forget what has been read of gold answers; for tests that change the rules."""
    _judge_candidates.cache_clear()
    _read_gold.cache_clear()
    _read_gold_sentence.cache_clear()
