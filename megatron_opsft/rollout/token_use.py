"""The overthinking meter: counts where the tokens of a response went."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_opsft.records import (
    THINK,
    THINK_END,
    FinishReason,
    Rollout,
    TextMarks,
    Thinking,
    TokenUse,
    Verdict,
)
from megatron_opsft.rollout.requests import split_text_by_token

Counts = NDArray[np.int64]

PASSAGE_TOKENS = 8
"""The n of the n-grams that `TokenUse.repeated_share` counts."""
# In the vocabulary of a SentencePiece model.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE = "<0x"
# Of the number that stands for a passage: odd, with no pattern in its bits.
_FACTOR = 0x9E3779B97F4A7C15


class TokenMeter:
    """Turns the verifier's marks in a text into counts of the tokens that were sampled.

    prompts_open_think: True if prompts end with `<think>`.
    """

    def __init__(self, tokenizer: Any, *, prompts_open_think: bool) -> None:
        self._tokenizer = tokenizer
        self._prompts_open_think = prompts_open_think

    def measure(self, rollout: Rollout, verdict: Verdict) -> TokenUse:
        """Count a response's tokens of thinking, those up to its first right answer and those of
        thinking that leaked behind `</think>`; add the repeated share, and the verifier's counts of
        restatements and doubts. A response that was cut off was not searched, so of it only the
        thinking is counted.
        """
        thinking, think_end = classify_thinking(
            rollout.text, prompts_open_think=self._prompts_open_think
        )
        is_finished = rollout.finish_reason is FinishReason.STOP
        num_tokens = len(rollout.response_ids)
        marks = verdict.marks or TextMarks()
        places = [
            place for place in (think_end, marks.first_right) if place is not None
        ]
        places += marks.leak or ()
        tokens_up_to = dict(
            zip(places, self._count_tokens(rollout, places), strict=True)
        )
        num_thinking = 0
        if thinking is Thinking.OPEN:
            num_thinking = num_tokens
        elif think_end is not None:
            num_thinking = tokens_up_to[think_end]
        first_right = None
        if marks.first_right is not None:
            first_right = tokens_up_to[marks.first_right]
        num_leaked = 0
        if marks.leak:
            leak_start, leak_end = marks.leak
            num_leaked = tokens_up_to[leak_end] - tokens_up_to[leak_start]
        return TokenUse(
            thinking=thinking,
            num_thinking=num_thinking,
            first_right=first_right,
            num_restated=marks.num_restated,
            num_doubts=marks.num_doubts,
            repeated_share=repeated_share(rollout.response_ids) if is_finished else 0.0,
            num_leaked=num_leaked,
        )

    def _count_tokens(self, rollout: Rollout, places: Sequence[int]) -> list[int]:
        """Return how many tokens the text up to each of these characters has, with the one that
        ends it.
        """
        if not places:
            return []
        sizes = [len(rollout.text[:place].encode()) for place in places]
        ends = np.cumsum(self._token_bytes(rollout))
        return [int(count) + 1 for count in np.searchsorted(ends, sizes)]

    def _token_bytes(self, rollout: Rollout) -> Counts:
        """Return how many bytes of the text in UTF-8 each token stands for."""
        ids = np.array(rollout.response_ids)
        num_bytes = len(rollout.text.encode())
        if rollout.finish_reason is FinishReason.STOP:
            ids = ids[:-1]  # the end token is not in the text
        vocabulary = self._bytes_of_vocabulary
        # Models have more rows than their tokenizer has tokens; such an id is no text.
        sizes = np.where(ids < len(vocabulary), vocabulary.take(ids, mode="clip"), 0)
        if sizes.sum() == num_bytes + 1:
            sizes[0] -= 1  # the tokenizer drops the space at the beginning of a text
        if sizes.sum() != num_bytes:
            pieces = split_text_by_token(self._tokenizer, ids.tolist())
            sizes = np.array([len(piece.encode()) for piece in pieces])
        return sizes

    @cached_property
    def _bytes_of_vocabulary(self) -> Counts:
        """The bytes of each token of the vocabulary, by id.

        A byte-level vocabulary has a letter for each byte; SentencePiece's has the text itself, and
        names for single bytes. Added tokens are written as they are in both.
        """
        tokens = self._tokenizer.convert_ids_to_tokens(range(len(self._tokenizer)))
        added = self._tokenizer.added_tokens_decoder
        is_byte_level = any(token and "Ġ" in token for token in tokens)
        sizes = []
        for number, token in enumerate(tokens):
            if number in added:
                size = len(added[number].content.encode())
            elif token is None:
                size = 0
            elif is_byte_level:
                size = len(token)
            elif token.startswith(_BYTE):
                size = 1
            else:
                size = len(token.replace(_SPACE, " ").encode())
            sizes.append(size)
        return np.array(sizes)


def classify_thinking(
    text: str, *, prompts_open_think: bool
) -> tuple[Thinking, int | None]:
    """Return how a response thinks, and where its thinking ends: the character behind its last
    `</think>`, None without one.
    """
    num_begun = text.count(THINK) + prompts_open_think
    num_ended = text.count(THINK_END)
    if num_ended == 0:
        return (Thinking.OPEN if num_begun else Thinking.NONE), None
    end = text.rindex(THINK_END)
    if num_begun != 1 or num_ended != 1:
        thinking = Thinking.MALFORMED
    elif text[:end].replace(THINK, "").strip():
        thinking = Thinking.CLOSED
    else:
        thinking = Thinking.EMPTY
    return thinking, end + len(THINK_END)


def repeated_share(token_ids: Sequence[int]) -> float:
    """Return the share of passages of 8 tokens that the response had already, 0 if it is shorter.

    Of the T - 7 passages that begin at any token, those count that are not the first of their kind.
    """
    if len(token_ids) <= PASSAGE_TOKENS:
        return 0.0
    passages = np.lib.stride_tricks.sliding_window_view(
        np.array(token_ids, dtype=np.int64), PASSAGE_TOKENS
    )
    # One number for each passage: a polynomial of its tokens, modulo 2^64.
    weights = np.cumprod(np.full(PASSAGE_TOKENS, _FACTOR, dtype=np.uint64))
    numbers = passages.astype(np.uint64) @ weights
    return 1.0 - len(np.unique(numbers)) / len(numbers)
