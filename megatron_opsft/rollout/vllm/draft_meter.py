"""What a draft model has brought, by vLLM's own counters (`LLM.get_metrics`)."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from megatron_opsft.rollout.draft_counts import DraftCounts

_PREFIX = "vllm:spec_decode_num_"
_NAMES = tuple(f"{_PREFIX}{what}" for what in ("drafts", "draft_tokens", "accepted_tokens"))


class DraftMeter:
    """Differences of the counters, which begin before this engine and never go back."""

    def __init__(self, read: Callable[[], Iterable[Any]]) -> None:
        """read: vLLM's metrics as they are now."""
        self._read = read
        self._before = self._values()

    def take(self) -> DraftCounts:
        """Since it was asked before; of passes that checked a draft alone. What they have saved is
        not known: there are none without.
        """
        now = self._values()
        rows, drafted, accepted = (now[name] - self._before[name] for name in _NAMES)
        self._before = now
        tokens = rows + accepted
        return DraftCounts(
            rows=rows, tokens=tokens, drafted=drafted, accepted=accepted, has_estimate=False
        )

    def _values(self) -> Counter[str]:
        values: Counter[str] = Counter()
        for metric in self._read():
            if metric.name in _NAMES:
                values[metric.name] += int(metric.value)
        return values
