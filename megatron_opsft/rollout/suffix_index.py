"""Drafts of what comes next in a response, from what was said before to the same problem: by its
siblings in the batch, by earlier responses of the run, and by the response itself.

Whatever follows the last place that ends in the same tokens is the draft. A draft decides how fast
a response is decoded and never what it says: engines check every token of it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

MATCHED = (8, 4, 2)  # tokens that must agree, the longest first
AFTER_WRONG = 1  # stands for such a number where a text is followed on behind a token that differed
_KEPT_TOKENS = 2**24  # of all problems' texts: 64 MiB
_INDEXED_TOKENS = 2**14  # of one problem's earlier texts: some 10 MB while it is being decoded

Place = tuple[int, list[int], int]  # how many tokens agreed; the text; where in it they end


class TextHistory:
    """Prompts with responses of this run by problem; the problems seen longest ago go first."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, list[NDArray[np.int32]]] = OrderedDict()
        self._num_tokens = 0

    def add(self, problem_id: str, text: Sequence[int]) -> None:
        """Keep a text; of its problem the latest ones stay."""
        kept = self._texts.setdefault(problem_id, [])
        self._texts.move_to_end(problem_id)
        kept.append(np.asarray(text, dtype=np.int32))
        self._num_tokens += len(text)
        while len(kept) > 1 and sum(map(len, kept)) > _INDEXED_TOKENS:
            self._num_tokens -= len(kept.pop(0))
        while self._num_tokens > _KEPT_TOKENS and len(self._texts) > 1:
            _, dropped = self._texts.popitem(last=False)
            self._num_tokens -= sum(map(len, dropped))

    def of(self, problem_id: str) -> list[list[int]]:
        """The texts of a problem, the latest one last."""
        return [text.tolist() for text in self._texts.get(problem_id, ())]


class SuffixIndex:
    """Where the texts of one problem go on after each few tokens; the latest place counts.

    Texts in the making are lists that grow elsewhere; `catch_up` reads what is new in them. Keys
    are hashes: that two sequences share one only costs a draft.
    """

    def __init__(self, finished: Iterable[list[int]], growing: Sequence[list[int]]) -> None:
        self._places: dict[int, dict[int, tuple[list[int], int]]] = {k: {} for k in MATCHED}
        self._growing = list(growing)
        self._done = [0] * len(growing)
        for text in finished:
            self._read(text, 0)

    def add(self, text: list[int]) -> None:
        """One more text in the making."""
        self._growing.append(text)
        self._done.append(0)

    def catch_up(self) -> None:
        """Read what was added to the growing texts."""
        for number, text in enumerate(self._growing):
            if self._done[number] < len(text) - 1:
                self._read(text, self._done[number])
                self._done[number] = len(text) - 1

    def find(self, text: Sequence[int]) -> Place | None:
        """Where the latest text that ends in the same tokens goes on; None where there is none."""
        for k, places in self._places.items():
            if place := places.get(hash(tuple(text[-k:]))):
                return k, *place
        return None

    def _read(self, text: list[int], start: int) -> None:
        """Places after the tokens from `start` on, but for the end, which nothing follows yet."""
        for k, places in self._places.items():
            first = max(k, start + 1)
            tokens = text[first - k : -1]
            grams = zip(*(tokens[i:] for i in range(k)), strict=False)
            places.update(
                zip(map(hash, grams), zip(repeat(text), range(first, len(text))), strict=False)
            )
