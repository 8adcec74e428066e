"""What kind of token each token of a response is: a word that turns back, a number, an end."""

import re
from collections.abc import Sequence
from itertools import accumulate

# Words with which a response turns back, doubts or checks; those that conclude (so, therefore,
# thus) are plain words.
TRANSITIONS = frozenset(
    (
        "actually",
        "again",
        "also",
        "alternatively",
        "although",
        "but",
        "hm",
        "hmm",
        "however",
    )
    + ("maybe", "oh", "ok", "okay", "perhaps", "though", "wait", "well")
)
SINGULAR = frozenset(("i", "me", "my", "mine", "myself"))
PLURAL = frozenset(("we", "us", "our", "ours", "ourselves"))
_WORD = re.compile(r"[^\W\d_]+")
_TAG = re.compile(r"<[^<>\s]+>")


def kinds_of(tokens: Sequence[str]) -> list[str]:
    """What kind of token each is, by the text around it. tokens: all pieces of a response; a token
    with letters counts as the word that its first letter belongs to, whole words of several tokens
    included.
    """
    whole = "".join(tokens)
    word_at = {
        place: found[0]
        for found in _WORD.finditer(whole)
        for place in range(*found.span())
    }
    starts = accumulate(map(len, tokens), initial=0)
    return [
        _kind(token, start, word_at)
        for token, start in zip(tokens, starts, strict=False)
    ]


def _kind(token: str, start: int, word_at: dict[int, str]) -> str:
    bare = token.strip()
    if _TAG.fullmatch(bare):
        return "end of thinking" if bare == "</think>" else "end of response"
    if letter := _WORD.search(token):
        word = word_at[start + letter.start()].lower()
        if word in TRANSITIONS:
            return "transition word"
        if word in SINGULAR or word in PLURAL:
            return f"first person {'singular' if word in SINGULAR else 'plural'}"
        return "word"
    if "\n" in token:
        return "line break"
    if any(sign.isdigit() for sign in bare):
        return "number"
    return (
        "mathematics"
        if any(sign in "+-*/=<>^_\\{}$%&|~" for sign in bare)
        else "punctuation"
    )
