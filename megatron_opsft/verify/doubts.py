"""Turns of self-doubt: the words with which a response begins to check or to change what it has
just worked out.
"""

from typing import NamedTuple

_NOTHING_MORE = ("",)
# What a turn begins with, in lower case: what follows is one of its phrases, or nothing more.
TURNS: dict[str, tuple[str, ...]] = {
    "wait": _NOTHING_MORE,
    "hmm": ("mm", "m", ""),
    "alternatively": _NOTHING_MORE,
    "actually": _NOTHING_MORE,
    "hold on": _NOTHING_MORE,
    "on second thought": _NOTHING_MORE,
    "another way": _NOTHING_MORE,
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
    "am i ": ("sure", "missing"),
    "i made ": ("a mistake", "an error"),
    "that's ": ("wrong", "not right", "not correct", "incorrect"),
    "等等": _NOTHING_MORE,
    "等一下": _NOTHING_MORE,
    "不对": _NOTHING_MORE,
    "或者": ("换", "用另"),
    "换一种": ("方法", "思路", "角度"),
    "再": ("检查", "验证", "想想", "想一想", "确认", "算一遍"),
    "让我": ("检查", "验证", "确认", "重新", "再"),
    "重新": ("考虑", "检查", "计算"),
}
# These are turns only where a clause begins: "they wait 5 minutes" is none.
_FIRST_OF_A_CLAUSE = frozenset(("wait", "alternatively", "actually", "hold on", "等等"))
_BEFORE_A_CLAUSE = ("but", "oh", "so", "no", "and", "okay", "hmm", "但", "哦")
# Characters between the phrases of one turn, such as "Wait, no, let me check".
_MAX_GAP = 12
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz")


class Turn(NamedTuple):
    """The place of one turn, in characters: text[start:end] is its words."""

    start: int
    end: int


def find_doubts(text: str) -> list[Turn]:
    """Return the turns of self-doubt in a text, in order. Phrases that overlap or stand close
    together, such as "Wait, let me check", are one turn.
    """
    lower = text.lower()
    if len(lower) != len(text):
        # A few letters, such as the Turkish dotted I, are longer in lower case.
        lower = "".join(letter.lower()[:1] for letter in text)
    turns: list[Turn] = []
    for start, end in sorted(_find_parts(lower)):
        if turns and start <= turns[-1].end + _MAX_GAP:
            turns[-1] = Turn(turns[-1].start, max(turns[-1].end, end))
        else:
            turns.append(Turn(start, end))
    return turns


def _find_parts(lower: str) -> list[tuple[int, int]]:
    """Return start and end of every phrase of `TURNS`, in no order; they may overlap."""
    found = []
    for beginning, phrases in TURNS.items():
        start = lower.find(beginning)
        while start >= 0:
            end = start + len(beginning)
            if lower.startswith(phrases, end):
                if phrases != _NOTHING_MORE:
                    end += next(len(p) for p in phrases if lower.startswith(p, end))
                if _stands_alone(lower, start, end) and (
                    beginning not in _FIRST_OF_A_CLAUSE or _begins_clause(lower, start)
                ):
                    found.append((start, end))
            start = lower.find(beginning, end)
    return found


def _begins_clause(lower: str, start: int) -> bool:
    """True if no other word of its clause stands in front of lower[start], except "but" and the
    like.
    """
    before = lower[max(0, start - 8) : start].rstrip(" *_")
    return not before[-1:].isalnum() or before.endswith(_BEFORE_A_CLAUSE)


def _stands_alone(lower: str, start: int, end: int) -> bool:
    """True if no Latin letter touches lower[start:end]: "await" and "waiting" are no turns."""
    before, behind = lower[start - 1 : start], lower[end : end + 1]
    return before not in _LETTERS and behind not in _LETTERS
