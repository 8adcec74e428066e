"""How many draft tokens a forward pass checks, from what it costs and how often drafts are right.

Both are measured while a batch is decoded. Seconds enter, so the lengths differ from run to run;
the tokens of responses do not depend on them.

A draft's tokens are right one by one with the chance of its kind (how many tokens agreed), so the
n-th brings chance^n tokens.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_opsft.rollout.draft_counts import DraftCounts
from megatron_opsft.rollout.pass_costs import PassCosts, PassShape
from megatron_opsft.rollout.saved_seconds import BatchSeconds
from megatron_opsft.rollout.suffix_index import AFTER_WRONG, MATCHED
from megatron_opsft.rollout.traits import ENGINES

_log = logging.getLogger(__name__)
MAX_DRAFT = max(engine.max_draft for engine in ENGINES.values())  # tokens
_KINDS = (*MATCHED, AFTER_WRONG)
_PRIOR = (2.0, 3.0)  # right ones of so many tokens, before anything was seen
_MEMORY = 0.98  # of what was seen, after each forward pass
_GAIN = 1.15  # by which drafts must be faster than none: a row that ends early ends no batch
_FIRST = 3  # passes without drafts that show what such a pass costs
_PLAIN_EVERY = 32  # passes with drafts, then one without
_IDLE = 3  # passes in a row for which no draft was worth it, then a pause
_NOTHING_PAUSE = 8  # passes; where none was found at all
_PAUSE, _LONGEST_PAUSE = 64, 2048  # passes; twice as many each time
_TRIAL = 8  # passes with drafts, which must have been faster by `_GAIN` together
_LOSS = 2.0  # passes without drafts: what a trial may lose before it ends


@dataclass(slots=True)
class _Trial:
    """Whether drafts pay with so many rows.

    passes: with drafts so far; seconds: they took; plain: as many tokens take without. idle: passes
    in a row for which no draft was worth it. has_begun: whether there was a pass with drafts since
    the last pause. left: of a pause; next_pause: how long the next is.
    """

    passes: int = 0
    seconds: float = 0.0
    plain: float = 0.0
    idle: int = 0
    has_begun: bool = False
    next_pause: int = _PAUSE
    left: int = 0

    def pause(self, num_passes: int) -> None:
        """No drafts for so long."""
        self.left, self.idle, self.has_begun = num_passes, 0, False
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
        self._costs = PassCosts()
        self._batch = BatchSeconds(0)
        # By power of two of rows.
        self._trials: defaultdict[int, _Trial] = defaultdict(_Trial)
        self._since_plain = 0
        self._told: set[int] = set()

    def open_batch(self, context: float = 0.0) -> None:
        """A new batch: half of what was seen of drafts is forgotten. context: of its first pass."""
        self._batch = BatchSeconds(context)
        for k in _KINDS:
            self._right[k] = (self._right[k] + _PRIOR[0]) / 2
            self._seen[k] = (self._seen[k] + _PRIOR[1]) / 2

    def close_batch(self, lengths: Sequence[int]) -> None:
        """Responses of so many tokens are complete, all of which a pass was timed for."""
        self.counts.saved_seconds += self._batch.saved(lengths, self._costs.plain)

    def rest(self, num_rows: int) -> int:
        """How many passes come before drafts are looked for; 0: now they are."""
        size = num_rows.bit_length()
        return self._trials[size].left if self._costs.is_timed(num_rows) else _FIRST

    def choose(self, shape: PassShape, kinds: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """How many tokens of each draft give the most tokens a second, all 0 where none do.

        kinds, lengths: of the rows that go on; kinds: one of `MATCHED` or `AFTER_WRONG`, 0 without
        a draft; lengths: of the drafts, at most `MAX_DRAFT`.
        """
        nothing = [0] * len(kinds)
        self._since_plain += 1
        if self._since_plain > _PLAIN_EVERY or not self._costs.is_timed(shape.rows):
            return nothing  # what a pass without drafts costs changes with the length of responses
        trial = self._trials[shape.rows.bit_length()]
        plain = self._costs.plain(shape.rows, shape.context)
        fixed, each = self._costs.drafts(shape.rows, shape.context)
        least, rate = self._least_chance(plain + fixed, each, kinds, lengths)
        if rate <= len(kinds) / plain * _GAIN:
            trial.idle += 1
            if trial.idle == _IDLE and any(kinds):
                self._stop(shape.rows)
            elif trial.idle == _IDLE:
                trial.pause(_NOTHING_PAUSE)
            return nothing
        trial.idle = 0
        most = {k: _most_tokens(self._chance(k), least) for k in set(kinds) if k}
        return [min(n, most[k]) if k else 0 for k, n in zip(kinds, lengths, strict=True)]

    def _least_chance(
        self, start: float, each: float, kinds: Sequence[int], lengths: Sequence[int]
    ) -> tuple[float, float]:
        """The chance that a draft token must have to be checked, and tokens a second if so; start,
        each: seconds of a pass with drafts, and of each token of them.
        """
        longer: Counter[tuple[int, int]] = Counter(zip(kinds, lengths, strict=True))
        candidates = []
        for k in set(kinds) - {0}:
            chance, rows = self._chance(k), 0
            for n in range(MAX_DRAFT, 0, -1):
                rows += longer[k, n]
                if rows:
                    candidates.append((chance**n, rows))
        candidates.sort(reverse=True)
        expected, seconds = float(len(kinds)), start
        least, best = 1.0, 0.0
        for (chance, rows), (following, _) in pairwise([*candidates, (0.0, 0)]):
            expected += chance * rows
            seconds += each * rows
            if chance > following and expected / seconds > best:
                least, best = chance, expected / seconds
        return least, best

    def note_plain(
        self, shape: PassShape, seconds: float, num_passes: int = 1, *, looking: float = 0.0
    ) -> None:
        """Passes without drafts took so long, after so many seconds in which drafts were looked
        for.
        """
        self._costs.note_plain(shape.rows, shape.context, seconds / num_passes)
        self._batch.note_plain(shape, num_passes, seconds)
        self._batch.spend(looking)
        self._since_plain = 0
        trial = self._trials[shape.rows.bit_length()]
        if 0 < trial.left <= num_passes:
            self._costs.forget_drafts(shape.rows)
        trial.left = max(trial.left - num_passes, 0)
        self.counts.rows += shape.live * num_passes
        self.counts.tokens += shape.live * num_passes

    def note(self, shape: PassShape, num_drafted: int, seconds: float, num_tokens: int) -> float:
        """A pass with so many draft tokens, looking for them included, took so long and gave so
        many tokens: seconds it saved, if every token is worth the same.
        """
        self._batch.spend(seconds)
        self.counts.rows += shape.live
        self.counts.tokens += num_tokens
        trial = self._trials[shape.rows.bit_length()]
        if trial.has_begun:  # the first one may have a lot of text to read
            self._costs.note_drafts(shape, num_drafted, seconds)
        trial.has_begun = True
        seconds = self._costs.clipped(shape, num_drafted, seconds)
        plain = self._costs.plain(shape.rows, shape.context)
        for k in _KINDS:
            self._right[k] *= _MEMORY
            self._seen[k] *= _MEMORY
        without = num_tokens / shape.live * plain
        self._judge(shape.rows, seconds, without, _LOSS * plain)
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


def _most_tokens(chance: float, least: float) -> int:
    """The longest draft whose last token has at least this chance."""
    n = 0
    while n < MAX_DRAFT and chance ** (n + 1) >= least:
        n += 1
    return n
