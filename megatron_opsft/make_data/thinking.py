"""Where in a response the thinking is, by the texts of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_opsft.methods.batch import THINK, THINK_END


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """span: tokens of the thinking, without tags; answer: first token behind the closing tag."""

    span: range
    answer: int


def find_thinking(texts: Sequence[str]) -> Thinking | None:
    """texts: of each token of a response. None where no thinking ends. A tag may be several tokens;
    one that shares a token with other text takes all of it.
    """
    whole, ends = "".join(texts), list(accumulate(map(len, texts)))
    closing = whole.find(THINK_END)
    if closing < 0:
        return None
    opening = whole.find(THINK, 0, closing)
    start = 0 if opening < 0 else _token_at(ends, opening + len(THINK) - 1) + 1
    stop = _token_at(ends, closing)
    answer = _token_at(ends, closing + len(THINK_END) - 1) + 1
    return Thinking(span=range(start, max(start, stop)), answer=answer)


def _token_at(ends: Sequence[int], character: int) -> int:
    """The token that a character of the text is in. ends: where each token's text ends."""
    return next(number for number, end in enumerate(ends) if character < end)
