"""The kind of each token of a response (a word that turns back, a number, an end), and whether it
stands before the first right answer or behind it.
"""

import re
from collections.abc import Sequence

from megatron_opsft.records import THINK_END

# Words with which a response turns back, doubts or checks; those that conclude (so, therefore,
# thus) are plain words.
TRANSITIONS = {
    "actually",
    "again",
    "also",
    "alternatively",
    "although",
    "but",
    "hm",
    "hmm",
    "however",
    "maybe",
    "oh",
    "ok",
    "okay",
    "perhaps",
    "though",
    "wait",
    "well",
}
SINGULAR = {"i", "me", "my", "mine", "myself"}
PLURAL = {"we", "us", "our", "ours", "ourselves"}
_WORD = re.compile(r"[^\W\d_]+")
_TAG = re.compile(r"<[^<>\s]+>")


def kinds_of(tokens: Sequence[str]) -> list[str]:
    """Return the kind of each token, by the text around it.

    tokens: all tokens of a response, as text. A token with letters counts as the word that its
    first letter belongs to, whole words of several tokens included.
    """
    word_at: dict[int, str] = {}  # position of a letter in the response -> its word
    for match in _WORD.finditer("".join(tokens)):
        word_at |= dict.fromkeys(range(*match.span()), match[0])
    kinds = []
    start = 0
    for token in tokens:
        kinds.append(_kind(token, start, word_at))
        start += len(token)
    return kinds


def _kind(token: str, start: int, word_at: dict[int, str]) -> str:
    """Return the kind of a token that begins at position `start` of the response."""
    bare = token.strip()
    if _TAG.fullmatch(bare):
        return "end of thinking" if bare == THINK_END else "end of response"
    if letters := _WORD.search(token):
        word = word_at[start + letters.start()].lower()
        if word in TRANSITIONS:
            return "transition word"
        if word in SINGULAR:
            return "first person singular"
        if word in PLURAL:
            return "first person plural"
        return "word"
    if "\n" in token:
        return "line break"
    if any(character.isdigit() for character in bare):
        return "number"
    if not set(bare).isdisjoint("+-*/=<>^_\\{}$%&|~"):
        return "mathematics"
    return "punctuation"


def stages_of(tokens: Sequence[str], first_right_char: int | None) -> list[str]:
    """Return where in the response each token begins: before the first right answer has ended, in
    the thinking behind it, or behind the thinking.

    first_right_char: characters up to that end; None if the response never states the answer.
    """
    text = "".join(tokens)
    think_end = text.rfind(THINK_END)
    answer_start = len(text) if think_end < 0 else think_end + len(THINK_END)
    stages = []
    start = 0
    for token in tokens:
        if start >= answer_start and think_end >= 0:
            stages.append("answer behind the thinking")
        elif first_right_char is None:
            stages.append("no right answer in the response")
        elif start < first_right_char:
            stages.append("up to the first right answer")
        else:
            stages.append("after the first right answer")
        start += len(token)
    return stages
