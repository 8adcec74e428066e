"""How many draft tokens a forward pass checks, from what it costs and how often drafts are right.

Both are measured while a batch is decoded. Seconds enter, so the lengths differ from run to run;
the tokens of responses do not depend on them.

A pass without drafts costs what it costs; each draft token is taken to add the same, which holds
closely where products of matrices are all there is. A draft's tokens are right one by one with the
chance of its kind (how many tokens agreed), so the n-th brings chance^n tokens.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_opsft.rollout.draft_counts import DraftCounts
from megatron_opsft.rollout.suffix_index import AFTER_WRONG, MATCHED
from megatron_opsft.rollout.traits import ENGINES

_log = logging.getLogger(__name__)
MAX_DRAFT = max(engine.max_draft for engine in ENGINES.values())  # tokens
_KINDS = (*MATCHED, AFTER_WRONG)
_PRIOR = (2.0, 3.0)  # right ones of so many tokens, before anything was seen
_MEMORY = 0.98  # of what was seen, after each forward pass
_GAIN = 1.15  # by which drafts must be faster than none: a row that ends early ends no batch
_TRY = 0.3  # of a plain pass's cost of a row: what a draft token is taken to cost at first
_FIRST = 3  # passes without drafts that show what such a pass costs
_PLAIN_EVERY = 32  # passes with drafts, then one without
_IDLE = 3  # passes in a row for which no draft was worth it, then a pause
_NOTHING_PAUSE = 8  # passes; where none was found at all
_PAUSE, _LONGEST_PAUSE = 64, 2048  # passes; twice as many each time
_TRIAL = 8  # passes with drafts, which must have been faster by `_GAIN` together
_LOSS = 2.0  # passes without drafts: what a trial may lose before it ends
_OUTLIER = 1.6  # times what was expected: a longer pass counts as one that took so long


@dataclass(slots=True)
class _Trial:
    """Whether drafts pay with so many rows.

    passes: with drafts so far; seconds: they took; plain: as many tokens take without. idle: passes
    in a row for which no draft was worth it. left: of a pause; next_pause: how long the next is.
    """

    passes: int = 0
    seconds: float = 0.0
    plain: float = 0.0
    idle: int = 0
    next_pause: int = _PAUSE
    left: int = 0

    def pause(self, num_passes: int) -> None:
        """No drafts for so long."""
        self.left, self.idle = num_passes, 0
        self.start()

    def start(self) -> None:
        """A new trial."""
        self.passes, self.seconds, self.plain = 0, 0.0, 0.0


class DraftLength:
    """Chooses the drafts of each forward pass; one for an engine."""

    def __init__(self) -> None:
        self.counts = DraftCounts()
        self._right = dict.fromkeys(_KINDS, _PRIOR[0])
        self._seen = dict.fromkeys(_KINDS, _PRIOR[1])
        # By power of two of rows: seconds of a row in a pass without drafts; of a draft token, as
        # the two sums of a regression.
        self._plain: dict[int, float] = {}
        self._draft: dict[int, tuple[float, float]] = {}
        self._trials: defaultdict[int, _Trial] = defaultdict(_Trial)
        self._since_plain = 0
        self._spent = 0.0  # seconds of this batch
        self._told: set[int] = set()

    def open_batch(self) -> None:
        """A new batch: half of what was seen of drafts is forgotten."""
        self._spent = 0.0
        for k in _KINDS:
            self._right[k] = (self._right[k] + _PRIOR[0]) / 2
            self._seen[k] = (self._seen[k] + _PRIOR[1]) / 2

    def close_batch(self, lengths: Sequence[int]) -> None:
        """Responses of so many tokens are complete: what they would have taken without drafts, one
        token of each in a pass, is compared with what they took.
        """
        ended, plain = 0, 0.0
        for number, length in enumerate(sorted(lengths)):
            plain += (length - ended) * self._plain_seconds(len(lengths) - number)
            ended = length
        self.counts.saved_seconds += plain - self._spent

    def _plain_seconds(self, num_rows: int) -> float:
        """Of a pass without drafts; where none was timed, as with the next number of rows."""
        known = self._timed_size(num_rows)
        if known != num_rows.bit_length():
            num_rows = 2 ** (known - 1)
        return self._plain[known] * num_rows

    def _timed_size(self, num_rows: int) -> int:
        """The power of two of rows, or the next one of which a pass was timed."""
        return min(self._plain, key=lambda size: abs(size - num_rows.bit_length()))

    def rest(self, num_rows: int) -> int:
        """How many passes come before drafts are looked for; 0: now they are."""
        size = num_rows.bit_length()
        return self._trials[size].left if size in self._plain else _FIRST

    def choose(self, num_rows: int, kinds: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """How many tokens of each draft give the most tokens a second, all 0 where none do.

        num_rows: of the pass, those that have ended included; kinds, lengths: of those that go on;
        kinds: one of `MATCHED` or `AFTER_WRONG`, 0 without a draft; lengths: of the drafts, at most
        `MAX_DRAFT`.
        """
        nothing = [0] * len(kinds)
        self._since_plain += 1
        size = num_rows.bit_length()
        if self._since_plain > _PLAIN_EVERY or size not in self._plain:
            return nothing  # what a pass without drafts costs changes with the length of responses
        trial = self._trials[size]
        plain = self._plain[size] * num_rows
        least, rate = self._least_chance(plain, self._draft_cost(size), kinds, lengths)
        if rate <= len(kinds) / plain * _GAIN:
            trial.idle += 1
            if trial.idle == _IDLE and any(kinds):
                self._stop(num_rows)
            elif trial.idle == _IDLE:
                trial.pause(_NOTHING_PAUSE)
            return nothing
        trial.idle = 0
        most = {k: _most_tokens(self._chance(k), least) for k in set(kinds) if k}
        return [min(n, most[k]) if k else 0 for k, n in zip(kinds, lengths, strict=True)]

    def _least_chance(
        self, plain: float, each: float, kinds: Sequence[int], lengths: Sequence[int]
    ) -> tuple[float, float]:
        """The chance that a draft token must have to be checked, and tokens a second if so."""
        longer: Counter[tuple[int, int]] = Counter(zip(kinds, lengths, strict=True))
        candidates = []
        for k in set(kinds) - {0}:
            chance, rows = self._chance(k), 0
            for n in range(MAX_DRAFT, 0, -1):
                rows += longer[k, n]
                if rows:
                    candidates.append((chance**n, rows))
        candidates.sort(reverse=True)
        expected, seconds = float(len(kinds)), plain
        least, best = 1.0, 0.0
        for (chance, rows), (following, _) in pairwise([*candidates, (0.0, 0)]):
            expected += chance * rows
            seconds += each * rows
            if chance > following and expected / seconds > best:
                least, best = chance, expected / seconds
        return least, best

    def note_plain(
        self,
        num_rows: int,
        num_live: int,
        seconds: float,
        num_passes: int = 1,
        *,
        looking: float = 0.0,
    ) -> None:
        """Passes without drafts over so many rows, some of which had ended, took so long, after so
        many seconds in which drafts were looked for.
        """
        size, each = num_rows.bit_length(), seconds / num_passes / num_rows
        known = self._plain.get(size, each)
        self._plain[size] = 0.8 * known + 0.2 * min(each, _OUTLIER * known)
        self._since_plain = 0
        trial = self._trials[size]
        trial.left = max(trial.left - num_passes, 0)
        self._spent += seconds + looking
        self.counts.rows += num_live * num_passes
        self.counts.tokens += num_live * num_passes

    def note(
        self, num_rows: int, num_live: int, num_drafted: int, seconds: float, num_tokens: int
    ) -> float:
        """A forward pass over so many rows with so many draft tokens, looking for them included,
        took so long and gave so many tokens: seconds it saved, if every token is worth the same.
        """
        self._spent += seconds
        self.counts.rows += num_live
        self.counts.tokens += num_tokens
        size = self._timed_size(num_rows)  # rows may have left since their drafts were chosen
        plain = self._plain_seconds(num_rows)
        expected = plain + self._draft_cost(size) * num_drafted
        seconds = min(seconds, _OUTLIER * expected)
        products, squares = self._draft.get(size, (0.0, 0.0))
        self._draft[size] = (
            _MEMORY * products + (seconds - plain) * num_drafted,
            _MEMORY * squares + num_drafted**2,
        )
        for k in _KINDS:
            self._right[k] *= _MEMORY
            self._seen[k] *= _MEMORY
        without = num_tokens / num_live * plain
        self._judge(num_rows, seconds, without, _LOSS * plain)
        return without - seconds

    def _judge(self, num_rows: int, seconds: float, without: float, most_lost: float) -> None:
        """A pass with drafts has taken so long, and its tokens take `without` without; drafts pause
        where the trial has lost more than `most_lost`, or was not faster by enough in the end.
        """
        size = num_rows.bit_length()
        trial = self._trials[size]
        trial.passes += 1
        trial.seconds += seconds
        trial.plain += without
        ends = trial.passes == _TRIAL
        if trial.seconds - trial.plain > most_lost or (
            ends and trial.plain < _GAIN * trial.seconds
        ):
            self._stop(num_rows)
        elif ends:
            trial.start()
            trial.next_pause = _PAUSE

    def _stop(self, num_rows: int) -> None:
        """No drafts for a while with so many rows; the log says so once for each size."""
        trial = self._trials[num_rows.bit_length()]
        trial.pause(trial.next_pause)
        trial.next_pause = min(2 * trial.next_pause, _LONGEST_PAUSE)
        if num_rows.bit_length() not in self._told:
            self._told.add(num_rows.bit_length())
            _log.info("speculation does not pay with %d responses a batch: off there", num_rows)

    def note_draft(self, kind: int, num_drafted: int, num_accepted: int) -> None:
        """So many of a draft's tokens were right; the first wrong one was seen too."""
        self.counts.drafted += num_drafted
        self.counts.accepted += num_accepted
        self._right[kind] += num_accepted
        self._seen[kind] += min(num_drafted, num_accepted + 1)

    def _chance(self, kind: int) -> float:
        """That a token of a draft is right if those before it are."""
        return min(max(self._right[kind] / max(self._seen[kind], 1e-3), 0.01), 0.99)

    def _draft_cost(self, size: int) -> float:
        """Seconds that a draft token adds to a pass."""
        products, squares = self._draft.get(size, (0.0, 0.0))
        first = _TRY * self._plain[size]
        return max((products + first) / (squares + 1), 0.01 * first)


def _most_tokens(chance: float, least: float) -> int:
    """The longest draft whose last token has at least this chance."""
    n = 0
    while n < MAX_DRAFT and chance ** (n + 1) >= least:
        n += 1
    return n
