"""Where every shipped judge looks for the answer, and what a verdict keeps of it."""

from megatron_opsft.data.boxed import find_boxes
from megatron_opsft.records import Outcome, Verdict

THINK_END = "</think>"
MAX_ANSWER_CHARS = 500  # of the answer kept in a verdict, for the log


def behind_thinking(text: str) -> str:
    """What follows the last `</think>`; all of the text where there is none."""
    return text.rpartition(THINK_END)[2]


def last_box(text: str) -> str | None:
    """Inside the last `\\boxed{...}`; None where there is none."""
    boxes = find_boxes(text)
    return boxes[-1].content if boxes else None


def make_verdict(outcome: Outcome, answer: str = "") -> Verdict:
    """The answer cut to what is kept."""
    return Verdict(outcome=outcome, answer=answer[:MAX_ANSWER_CHARS])
