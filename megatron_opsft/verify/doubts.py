"""Turns of self-doubt: the words with which a response begins to check or to change what it has
just worked out.
"""

from typing import NamedTuple

# What a turn begins with, in lower case: what follows is one of its phrases, or nothing more.
TURNS: dict[str, tuple[str, ...]] = {
    "wait": ("",),
    "hmm": ("mm", "m", ""),
    "alternatively": ("",),
    "actually": ("",),
    "hold on": ("",),
    "on second thought": ("",),
    "another way": ("",),
    "let me ": (
        "check",
        "double",
        "verify",
        "recheck",
        "re-check",
        "rethink",
        "reconsider",
        "think again",
        "see if",
        "make sure",
        "just make sure",
        "confirm",
        "try another",
        "recalculate",
    ),
    "to ": (
        "make sure",
        "be sure",
        "be safe",
        "be thorough",
        "double-check",
        "double check",
    ),
    "is that ": ("right?", "correct?"),
    "is this ": ("right?", "correct?"),
    "did i ": ("make a mistake", "miss"),
    "等等": ("",),
    "等一下": ("",),
    "不对": ("",),
    "或者": ("换", "用另"),
    "换一种": ("方法", "思路", "角度"),
    "再": ("检查", "验证", "想想", "想一想", "确认", "算一遍"),
    "让我": ("检查", "验证", "确认", "重新", "再"),
    "重新": ("考虑", "检查", "计算"),
}
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz")


class Turn(NamedTuple):
    """The place of one turn, in characters: text[start:end] is its words."""

    start: int
    end: int


def find_doubts(text: str) -> list[Turn]:
    """Return the turns of self-doubt in a text, in order. Of two that overlap, such as "let me
    double-check" and "check", the first counts.
    """
    lower = text.lower()
    if len(lower) != len(text):
        # A few letters, such as the Turkish dotted I, are longer in lower case.
        lower = "".join(letter.lower()[:1] for letter in text)
    found = []
    for beginning, phrases in TURNS.items():
        start = lower.find(beginning)
        while start >= 0:
            end = start + len(beginning)
            phrase = next((p for p in phrases if lower.startswith(p, end)), None)
            if phrase is not None and _stands_alone(lower, start, end + len(phrase)):
                found.append(Turn(start, end + len(phrase)))
            start = lower.find(beginning, end)
    turns: list[Turn] = []
    for turn in sorted(found):
        if not turns or turn.start >= turns[-1].end:
            turns.append(turn)
    return turns


def _stands_alone(lower: str, start: int, end: int) -> bool:
    """True if no Latin letter touches lower[start:end]: "await" and "waiting" are no turns."""
    before, behind = lower[start - 1 : start], lower[end : end + 1]
    return before not in _LETTERS and behind not in _LETTERS
