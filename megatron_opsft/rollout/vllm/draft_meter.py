"""What a draft model brings, by vLLM's own counters (`LLM.get_metrics`), and whether it goes on."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from megatron_opsft.rollout.draft_counts import DraftCounts

_PREFIX = "vllm:spec_decode_num_"
_NAMES = tuple(f"{_PREFIX}{what}" for what in ("drafts", "draft_tokens", "accepted_tokens"))
_LEAST_PASS_TOKENS = 1.1  # a pass with drafts costs at least a tenth more than one without
_ENOUGH_ROWS = 256  # of passes, to judge by


class DraftMeter:
    """Differences of the counters, which begin before this engine and never go back.

    The ranks of an engine count the same, so they stop its drafts together.
    """

    def __init__(self, read: Callable[[], Iterable[Any]], stop: Callable[[], None]) -> None:
        """read: vLLM's metrics as they are now; stop: lets it draft no more."""
        self._read, self._stop = read, stop
        self._before = self._values()
        self._judged = self._before

    def take(self) -> DraftCounts:
        """Since it was asked before; of passes that checked a draft alone. What they have saved is
        not known: there are none without. Drafts end here where they have not paid.
        """
        now = self._values()
        rows, drafted, accepted = (now[name] - self._before[name] for name in _NAMES)
        self._before = now
        stops = self._judge(now)
        return DraftCounts(
            rows=rows,
            tokens=rows + accepted,
            drafted=drafted,
            accepted=accepted,
            has_estimate=False,
            stopped=int(stops),
        )

    def _judge(self, now: Counter[str]) -> bool:
        """Whether drafts have ended just now."""
        rows, _, accepted = (now[name] - self._judged[name] for name in _NAMES)
        if rows < _ENOUGH_ROWS:
            return False
        self._judged = now
        if rows + accepted >= _LEAST_PASS_TOKENS * rows:
            return False
        self._stop()
        return True

    def _values(self) -> Counter[str]:
        values: Counter[str] = Counter()
        for metric in self._read():
            if metric.name in _NAMES:
                values[metric.name] += int(metric.value)
        return values
