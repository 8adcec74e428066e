"""Where in a response the thinking is, by the texts of its tokens."""

from collections.abc import Sequence
from itertools import accumulate

from megatron_opsft.methods.batch import THINK, THINK_END


def find_thinking(texts: Sequence[str]) -> slice | None:
    """The tokens of the thinking, without tags; None where no thinking ends.

    texts: of each token of a response. A tag may be several tokens; one that shares a token with
    other text takes all of it.
    """
    whole, ends = "".join(texts), list(accumulate(map(len, texts)))
    closing = whole.find(THINK_END)
    if closing < 0:
        return None
    opening = whole.find(THINK, 0, closing)
    start = 0 if opening < 0 else _token_at(ends, opening + len(THINK) - 1) + 1
    return slice(start, max(start, _token_at(ends, closing)))


def _token_at(ends: Sequence[int], character: int) -> int:
    """The token that a character of the text is in. ends: where each token's text ends."""
    return next(index for index, end in enumerate(ends) if character < end)
