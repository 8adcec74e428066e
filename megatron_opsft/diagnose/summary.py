"""summary.json of a diagnosis: D_t by kind of token and by position, and where it is large.

tokens.jsonl is read twice, a response at a time: once for what counts as large, once for the rest.
"""

import heapq
from collections import defaultdict
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatron_opsft.diagnose.kinds import KINDS, kinds_of
from megatron_opsft.report.diagnosis import DiagnosedResponse, read_responses

HIGH_QUANTILE = 0.95  # of all tokens, those above it have a large D_t
NUM_LARGEST, NUM_WORDS = 50, 200
_RELATIVE_BINS = 20
_FIRST_BORDER = 16  # absolute positions: up to here, then up to twice as many each
_CONTEXT = 60  # characters before a token of the table


class _Mean:
    """Tokens, the sum of their D_t, and how many have a large one."""

    def __init__(self) -> None:
        self.tokens, self.kl, self.num_high = 0, 0.0, 0

    def add(self, kl: np.ndarray, high: np.ndarray) -> None:
        self.tokens += len(kl)
        self.kl += float(kl.sum())
        self.num_high += int(high.sum())

    @property
    def mean(self) -> float:
        return self.kl / max(self.tokens, 1)


class _Largest:
    """The tokens of largest D_t, with what the efficient model prefers there."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, dict[str, Any]]] = []
        self._count = 0

    def add(self, response: DiagnosedResponse) -> None:
        for each in response.alternatives:
            kl = response.kl[each.position]
            if len(self._heap) == NUM_LARGEST and kl <= self._heap[0][0]:
                continue
            row = {
                "problem_id": response.problem_id,
                "sample_index": response.sample_index,
                "before": "".join(response.tokens[: each.position])[-_CONTEXT:],
                "text": response.tokens[each.position],
                "kl": kl,
                **asdict(each),
            }
            self._count += 1
            heapq.heappush(self._heap, (kl, -self._count, row))
            del self._heap[: len(self._heap) - NUM_LARGEST]

    def rows(self) -> list[dict[str, Any]]:
        return [row for _, _, row in sorted(self._heap, key=lambda item: item[:2], reverse=True)]


def summarize(directory: Path, *, original: str, efficient: str) -> dict[str, Any]:
    """See docs/diagnose.md. original, efficient: labels. Errors: as of `read_responses`."""
    every = np.concatenate([np.asarray(each.kl) for each in read_responses(directory)])
    high_kl = float(np.quantile(every, HIGH_QUANTILE))
    kinds = {kind: _Mean() for kind in KINDS}
    relative = [_Mean() for _ in range(_RELATIVE_BINS)]
    absolute: dict[int, _Mean] = defaultdict(_Mean)
    words: dict[str, _Mean] = defaultdict(_Mean)
    largest, num_responses = _Largest(), 0
    for response in read_responses(directory):
        num_responses += 1
        kl = np.asarray(response.kl)
        high = (kl >= high_kl) & (kl > 0)
        for keys, means in (
            (np.asarray(kinds_of(response.tokens)), kinds),
            (np.arange(len(kl)) * _RELATIVE_BINS // len(kl), relative),
            (_doublings(len(kl)), absolute),
        ):
            for key in np.unique(keys):
                means[key].add(kl[keys == key], high[keys == key])  # type: ignore[index]
        for place in high.nonzero()[0]:
            words[_word(response.tokens[place])].add(kl[place : place + 1], np.ones(1))
        largest.add(response)
    total = float(every.sum())
    by_kl = sorted(words.items(), key=lambda item: (-item[1].kl, item[0]))
    return {
        "original": original,
        "efficient": efficient,
        "num_responses": num_responses,
        "num_tokens": len(every),
        "mean_kl": float(every.mean()),
        "max_kl": float(every.max()),
        "quantiles": {str(q): float(np.quantile(every, q)) for q in (0.5, 0.9, 0.99)},
        "high_kl": high_kl,
        "num_high": sum(mean.num_high for mean in kinds.values()),
        "kinds": [
            {
                "kind": kind,
                "tokens": mean.tokens,
                "mean_kl": mean.mean,
                "share": mean.kl / total if total else 0.0,
                "num_high": mean.num_high,
            }
            for kind, mean in kinds.items()
            if mean.tokens
        ],
        "by_relative_position": [
            {**_bin(n / _RELATIVE_BINS, (n + 1) / _RELATIVE_BINS, mean)}
            for n, mean in enumerate(relative)
            if mean.tokens
        ],
        "by_position": [_bin(*_span(n), absolute[n]) for n in sorted(absolute)],
        "words": [
            {"text": text, "count": mean.tokens, "kl": mean.kl} for text, mean in by_kl[:NUM_WORDS]
        ],
        "largest": largest.rows(),
    }


def _bin(start: float, stop: float, mean: _Mean) -> dict[str, Any]:
    return {"start": start, "stop": stop, "tokens": mean.tokens, "mean_kl": mean.mean}


def _doublings(length: int) -> np.ndarray:
    """The number of the bin of each position."""
    return np.floor(np.log2(np.maximum(np.arange(length) / _FIRST_BORDER, 0.5))).astype(int) + 1


def _span(number: int) -> tuple[int, int]:
    borders = [0, *(_FIRST_BORDER << n for n in range(number + 1))]
    return list(pairwise(borders))[number]


def _word(token: str) -> str:
    """What the cloud shows of a token: without the space around it, line breaks as a sign."""
    return token.strip() + "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}" * token.count("\n") or " "
