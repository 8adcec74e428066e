"""vLLM's own counters of speculative tokens, as `LLM.get_metrics` has them."""

from collections.abc import Callable, Iterable
from typing import Any

from megatron_opsft.rollout.engine import SpecCounts

_NAMES = tuple(
    f"vllm:spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens")
)


class SpecCounters:
    """What an engine has counted since it was asked before. vLLM's counters are the process's: they
    begin before this engine, and there may be several of a name.
    """

    def __init__(self, read: Callable[[], Iterable[Any]]) -> None:
        """read: vLLM's metrics as they are now."""
        self._read = read
        self._before = self._values()

    def take(self) -> SpecCounts:
        now, before = self._values(), self._before
        self._before = now
        drafts, draft_tokens, accepted = (b - a for a, b in zip(before, now, strict=True))
        return SpecCounts(drafts=drafts, draft_tokens=draft_tokens, accepted=accepted)

    def _values(self) -> list[int]:
        metrics = list(self._read())
        return [int(sum(m.value for m in metrics if m.name == name)) for name in _NAMES]
