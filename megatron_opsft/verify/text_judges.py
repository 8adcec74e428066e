"""The shipped judges that compare text: `choice`, `exact` and `regex`.

Each reads the answer behind the last `</think>` (in all of the text where there is none): the last
`\\boxed{...}`, else all of it; nothing where the last box is never closed.
"""

import re
from collections.abc import Callable

from megatron_opsft.data.boxed import last_box
from megatron_opsft.records import Outcome, Verdict
from megatron_opsft.verify.answer import behind_thinking, make_verdict

# A letter at the beginning, perhaps in brackets or a wrapper: B, (b), B. 42, \text{(B)}.
_LEADING = re.compile(r"\W*(?:(?:text|textbf|mathrm|mathbf)\W+)?([A-Ea-e])(?![^\W_])")
# What is called the answer comes before what is only mentioned.
_SAID = tuple(
    re.compile(rf"(?i:\b(?:{words})\b)(?i:\W*\b(?:is|option|choice)\b)*\W*([A-E])(?![^\W_])")
    for words in ("answer", "option|choice")
)
_BRACKETED = re.compile(r"\(([A-E])\)")


def choice(text: str, gold: str) -> Verdict:
    """A letter from A to E: in the box, else after the last "answer", else after the last "option"
    or "choice", else in the last round brackets, else at the beginning of the last line. A gold
    answer without one is an ERROR.
    """
    wanted = _LEADING.match(gold)
    if wanted is None:
        return make_verdict(Outcome.ERROR, f"the gold answer {gold!r} is no letter from A to E")
    letter = _read_letter(text)
    return _compared(letter, letter == wanted[1].upper())


def exact(text: str, gold: str) -> Verdict:
    """The same text but for white space."""
    answer = _read_answer(text)
    return _compared(answer, answer.split() == gold.split())


def regex(text: str, gold: str) -> Verdict:
    """The gold answer is a regular expression of Python's, searched for in the answer; `^` and `$`
    are the ends of it. One that is not valid is an ERROR.
    """
    answer = _read_answer(text)
    try:
        found = re.search(gold, answer)
    except re.error as error:
        return make_verdict(
            Outcome.ERROR, f"the gold answer {gold!r} is no regular expression: {error}"
        )
    return _compared(answer, found is not None)


TEXT_JUDGES: dict[str, Callable[[str, str], Verdict]] = {
    "choice": choice,
    "exact": exact,
    "regex": regex,
}


def _compared(answer: str, same: bool) -> Verdict:
    if not answer:
        return make_verdict(Outcome.NO_ANSWER)
    return make_verdict(Outcome.CORRECT if same else Outcome.WRONG, answer)


def _read_answer(text: str) -> str:
    tail = behind_thinking(text)
    box = last_box(tail)
    return tail.strip() if box is None else box.content


def _read_letter(text: str) -> str:
    """Upper case; "" where there is none."""
    tail = behind_thinking(text).strip()
    box = last_box(tail)
    if box is not None:
        match = _LEADING.match(box.content)
        return match[1].upper() if match else ""
    for pattern in (*_SAID, _BRACKETED):
        if found := pattern.findall(tail):
            return found[-1]
    last_line = tail.rpartition("\n")[2]
    match = re.match(r"\W*([A-E])(?:\W*$|[.):])", last_line)
    return match[1] if match else ""
