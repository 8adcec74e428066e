"""Words of a response, as stretches of its tokens."""

from collections.abc import Sequence
from itertools import pairwise


def words_of(texts: Sequence[str]) -> list[range]:
    """Tokens of each word. texts: of each token; a word begins where white space ends."""
    starts = [
        number
        for number, text in enumerate(texts)
        if number == 0 or text[:1].isspace() or texts[number - 1][-1:].isspace()
    ]
    return [range(a, b) for a, b in pairwise([*starts, len(texts)])]
