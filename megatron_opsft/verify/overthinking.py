"""What the judge's worker notices in a response beside its verdict: where it states the right
answer, and where it doubts itself. `rollout.token_use` counts the tokens.
"""

from collections.abc import Callable

from megatron_opsft.records import THINK_END, Outcome, TextMarks, Verdict
from megatron_opsft.verify.doubts import find_doubts
from megatron_opsft.verify.right_answers import find_right_answers


def mark(
    text: str,
    gold: str,
    verdict: Verdict,
    is_right: Callable[[str, str], bool] | None,
) -> TextMarks:
    """Return where a judged response first states the right answer, how often it states it again
    and doubts itself, and where thinking goes on behind `</think>`.

    The right answer is looked for in sentences and equations. If none states it though the judge
    accepts the response, which may be nothing but "42", it stands where the judge has read it.

    is_right: says of a part of the text and the gold whether they are the same answer. None if
    nobody can say that: then the right answer is not looked for.
    """
    ends: list[int] = []
    if is_right is not None:
        answers = [gold]
        if verdict.outcome is Outcome.CORRECT:
            answers.append(verdict.answer)
        ends = find_right_answers(text, answers, lambda value: is_right(value, gold))
        if not ends and verdict.answer and verdict.outcome is Outcome.CORRECT:
            place = text.rfind(verdict.answer)
            ends = [place + len(verdict.answer)] if place >= 0 else []
    doubts = find_doubts(text)
    answer_start = text.rfind(THINK_END)
    leaked = [doubt for doubt in doubts if 0 <= answer_start < doubt.start]
    return TextMarks(
        first_right=ends[0] if ends else None,
        num_restated=max(len(ends) - 1, 0),
        num_doubts=len(doubts),
        leak=(leaked[0].start, leaked[-1].end) if leaked else None,
    )
