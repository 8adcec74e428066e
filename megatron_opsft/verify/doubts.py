"""Turns of self-doubt: the words with which a response begins to check or to change what it has
just worked out.
"""

import re
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
    "to make sure": _NOTHING_MORE,
    "to be ": ("sure", "safe", "thorough"),
    "to double": ("-check", " check"),
    "is that right?": _NOTHING_MORE,
    "is that correct?": _NOTHING_MORE,
    "is this right?": _NOTHING_MORE,
    "is this correct?": _NOTHING_MORE,
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
# The characters of the beginnings in Latin letters, by how rare they are in responses. Any other
# character is rarer.
_RARE_FIRST = "?'kvgbywcpmdfuhlrsnioate "


class _Search(NamedTuple):
    """A search for the turns that have one rare letter in their beginnings. They are found together
    and from that letter on: `re` looks for a letter fast, and most of all for a rare one.
    """

    pattern: re.Pattern[str]
    """Its groups are the turns, each from the rare letter on."""
    nums_in_front: list[int]
    """Of each group: how many characters of its beginning stand in front of the rare letter."""
    begin_clauses: list[bool]
    """Of each group: whether it is a turn only where a clause begins."""


def _searches(turns: dict[str, tuple[str, ...]]) -> list[_Search]:
    """Return searches for all turns."""
    by_letter: dict[str, list[str]] = {}
    for beginning in turns:
        rarest = min(beginning, key=_RARE_FIRST.find)
        by_letter.setdefault(rarest, []).append(beginning)
    searches = []
    for rarest, beginnings in by_letter.items():
        nums_in_front = [beginning.index(rarest) for beginning in beginnings]
        groups = "|".join(
            _group(beginning, turns[beginning], num_in_front)
            for beginning, num_in_front in zip(beginnings, nums_in_front, strict=True)
        )
        begin_clauses = [beginning in _FIRST_OF_A_CLAUSE for beginning in beginnings]
        pattern = re.compile(re.escape(rarest) + f"(?:{groups})")
        searches.append(_Search(pattern, nums_in_front, begin_clauses))
    return searches


def _group(beginning: str, phrases: tuple[str, ...], num_in_front: int) -> str:
    """Return the group of a turn's words behind its rarest letter. No Latin letter touches a turn:
    "await" and "waiting" are none.
    """
    begun = re.escape(beginning)
    rest = re.escape(beginning[num_in_front + 1 :])
    behind = "|".join(map(re.escape, phrases))
    return rf"({rest}(?<={begun})(?<![a-z]{begun})(?:{behind})(?![a-z]))"


_ALL_SEARCHES = _searches(TURNS)
_ASCII_SEARCHES = _searches({turn: TURNS[turn] for turn in TURNS if turn.isascii()})


class Turn(NamedTuple):
    """The place of one turn, in characters: text[start:end] is its words."""

    start: int
    end: int


def find_doubts(text: str) -> list[Turn]:
    """Return the turns of self-doubt in a text, in order. Phrases that overlap or stand close
    together, such as "Wait, let me check", are one turn.
    """
    lower = _in_small_letters(text)
    turns: list[Turn] = []
    first, last = -1, -1  # of the turn that may go on
    for start, end in sorted(_find_parts(lower)):
        if first >= 0 and start <= last + _MAX_GAP:
            last = max(last, end)
            continue
        if first >= 0:
            turns.append(Turn(first, last))
        first, last = start, end
    if first >= 0:
        turns.append(Turn(first, last))
    return turns


def _in_small_letters(text: str) -> str:
    """Return the text with its Latin letters A to Z in lower case, at the same places. `str.lower`
    looks up every other character, and makes two of the Turkish dotted I.
    """
    if text.isascii():
        return text.lower()
    # The only others of which `str.lower` makes a Latin letter: the dotted I, the sign of kelvin.
    text = text.replace("\u0130", "i").replace("\u212a", "k")
    # As bytes: of these, `lower` changes A to Z alone.
    return text.encode(errors="surrogatepass").lower().decode(errors="surrogatepass")


def _find_parts(lower: str) -> list[tuple[int, int]]:
    """Return start and end of every phrase of `TURNS`, in no order; they may overlap."""
    found = []
    searches = _ASCII_SEARCHES if lower.isascii() else _ALL_SEARCHES
    for pattern, nums_in_front, begin_clauses in searches:
        for part in pattern.finditer(lower):
            group = (part.lastindex or 0) - 1
            start = part.start() - nums_in_front[group]
            if not begin_clauses[group] or _begins_clause(lower, start):
                found.append((start, part.end()))
    return found


def _begins_clause(lower: str, start: int) -> bool:
    """True if no other word of its clause stands in front of lower[start], except "but" and the
    like.
    """
    before = lower[max(0, start - 8) : start].rstrip(" *_")
    return not before[-1:].isalnum() or before.endswith(_BEFORE_A_CLAUSE)
