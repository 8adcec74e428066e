"""Token ids as the pieces of text that they add, one after the other."""

from collections.abc import Sequence
from typing import Any

_TORN = "\N{REPLACEMENT CHARACTER}"


def pieces_of(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds to those before it; joined they are the whole text.

    A character of several tokens is with the last of them, the others add nothing. Decoded in
    context, since some tokenizers drop a space where a text begins.
    """

    def text_of(first: int, stop: int) -> str:
        return str(
            tokenizer.decode(
                token_ids[first:stop],
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
        )

    pieces: list[str] = []
    context = read = 0  # first token of the context, first token that was not read yet
    for stop in range(1, len(token_ids) + 1):
        before, text = text_of(context, read), text_of(context, stop)
        is_whole = not text.endswith(_TORN) or stop == len(token_ids)
        pieces.append(text[len(before) :] if is_whole else "")
        if is_whole:
            context, read = read, stop
    return pieces
