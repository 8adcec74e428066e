"""How many draft tokens a forward pass checks, from what it costs and how often drafts are right.

Both are measured while a batch is decoded. Seconds enter, so the lengths differ from run to run;
the tokens of responses do not depend on them.
"""

import logging
from collections.abc import Sequence

from megatron_opsft.rollout.draft_counts import DraftCounts
from megatron_opsft.rollout.suffix_index import MATCHED

_log = logging.getLogger(__name__)
WIDTHS = (1, 2, 4, 8, 16)  # tokens of a row in a forward pass, the last drawn one first
_PRIOR = (2.0, 3.0)  # right ones of so many tokens, before anything was seen
_MEMORY = 0.98  # of what was seen, after each forward pass
_GAIN = 1.1  # by which drafts must be faster than none: finding them takes time too
_IDLE = 4  # passes in a row without a draft, after which none is looked for
_TRY = 1.5  # times the cost of half the width: what one never tried is taken to cost
_PLAIN_EVERY = 32  # passes with drafts, then one without
_PAUSE = 16  # for so many passes, then twice as many; but for a batch that has shrunk by half


class DraftLength:
    """Chooses the width of each forward pass; one for an engine."""

    def __init__(self) -> None:
        self.counts = DraftCounts()
        self._right = dict.fromkeys(MATCHED, _PRIOR[0])
        self._seen = dict.fromkeys(MATCHED, _PRIOR[1])
        self._seconds: dict[tuple[int, int], float] = {}  # of a row, by power of two of rows, width
        self._since_plain = 0
        self._idle = self._pause = self._left = self._rows = 0
        self._told = False

    def open_batch(self, num_rows: int) -> None:
        """A new batch: drafts get another chance, half of what was seen is forgotten."""
        self._rows, self._idle, self._pause, self._left = num_rows, 0, _PAUSE, 0
        for k in MATCHED:
            self._right[k] = (self._right[k] + _PRIOR[0]) / 2
            self._seen[k] = (self._seen[k] + _PRIOR[1]) / 2

    def wants_drafts(self, num_rows: int) -> bool:
        """Whether drafts are to be looked for before the next pass."""
        if 2 * num_rows <= self._rows:
            self._rows, self._idle, self._pause, self._left = num_rows, 0, _PAUSE, 0
        self._left -= 1
        return self._left < 0

    def width(self, drafts: Sequence[tuple[int, list[int]]]) -> int:
        """The width with the most tokens a second, one of `WIDTHS`; drafts: of every row."""
        num_rows = len(drafts)
        longest = max(len(tokens) for _, tokens in drafts)
        self._since_plain += 1
        if self._since_plain > _PLAIN_EVERY or (num_rows.bit_length(), 1) not in self._seconds:
            return 1  # what a pass without drafts costs changes with the length of responses
        plain = num_rows / self._cost(num_rows, 1)
        best, best_rate = 1, plain * _GAIN
        for width in WIDTHS[1:]:
            if width > 2 * longest:
                break
            rate = self._expected(drafts, width) / self._cost(num_rows, width)
            if rate > best_rate:
                best, best_rate = width, rate
        self._idle = 0 if best > 1 else self._idle + 1
        if self._idle >= _IDLE:
            self._left, self._pause, self._idle = self._pause, 2 * self._pause, _IDLE - 1
            if not self._told:
                self._told = True
                _log.info("speculation does not pay with %d responses a batch: off there", num_rows)
        return best

    def note(
        self, num_rows: int, num_live: int, width: int, seconds: float, num_tokens: int
    ) -> None:
        """A forward pass of so many rows, some of which had ended, took so long and gave so many
        tokens.
        """
        key = num_rows.bit_length(), width
        each = seconds / num_rows
        self._seconds[key] = 0.7 * self._seconds.get(key, each) + 0.3 * each
        if width == 1:
            self._since_plain = 0
        counts = self.counts
        counts.rows += num_live
        counts.tokens += num_tokens
        if width > 1:
            counts.saved_seconds += num_tokens / num_live * self._cost(num_rows, 1) - seconds
            for k in MATCHED:
                self._right[k] *= _MEMORY
                self._seen[k] *= _MEMORY

    def note_draft(self, matched: int, num_drafted: int, num_accepted: int) -> None:
        """So many of a draft's tokens were right; the first wrong one was seen too."""
        self.counts.drafted += num_drafted
        self.counts.accepted += num_accepted
        self._right[matched] += num_accepted
        self._seen[matched] += min(num_drafted, num_accepted + 1)

    def _expected(self, drafts: Sequence[tuple[int, list[int]]], width: int) -> float:
        """Tokens that all rows together may expect."""
        total = float(len(drafts))
        for matched, tokens in drafts:
            if tokens:
                right = min(self._right[matched] / max(self._seen[matched], 1e-3), 0.99)
                total += right * (1 - right ** min(len(tokens), width - 1)) / (1 - right)
        return total

    def _cost(self, num_rows: int, width: int) -> float:
        """Seconds of a pass; of a width not tried yet, half again what half of it takes."""
        size, factor = num_rows.bit_length(), 1.0
        while (size, width) not in self._seconds and width > 1:
            width, factor = width // 2, factor * _TRY
        return factor * self._seconds.get((size, width), 0.0) * num_rows
