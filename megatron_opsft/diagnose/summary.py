"""summary.json of a diagnosis: D_t by kind of token and by position, and where it is large."""

import heapq
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_opsft.diagnose.kinds import KINDS, kinds_of
from megatron_opsft.report.diagnosis import Alternative, DiagnosedResponse

HIGH_QUANTILE = 0.95  # of all tokens, those above it have a large D_t
NUM_LARGEST, NUM_WORDS = 50, 200
_RELATIVE_BINS = 20
_EDGES = (0, *(16 << n for n in range(32)))  # of the bins of absolute positions
_CONTEXT = 60  # characters before a token of the table
_LINE_BREAK = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"


def summarize(
    responses: Sequence[DiagnosedResponse], *, original: str, efficient: str
) -> dict[str, Any]:
    """See docs/evaluation.md. original, efficient: labels."""
    lengths = [len(each.tokens) for each in responses]
    kl = np.concatenate([each.kl for each in responses])
    high_kl = float(np.quantile(kl, HIGH_QUANTILE))
    high = (kl >= high_kl) & (kl > 0)
    total = float(kl.sum())
    kinds = _means([kind for each in responses for kind in kinds_of(each.tokens)], kl, high)
    relative = _means(np.concatenate([np.arange(n) * _RELATIVE_BINS // n for n in lengths]), kl)
    positions = np.concatenate([np.arange(n) for n in lengths])
    absolute = _means(np.searchsorted(_EDGES, positions, side="right") - 1, kl)
    at_high = zip((token for each in responses for token in each.tokens), high, strict=True)
    found = [_word(token) for token, is_high in at_high if is_high]
    words = _means(np.array(found, dtype=object), kl[high])
    by_kl = sorted(words, key=lambda row: (-row["kl"], row["key"]))
    return {
        "original": original,
        "efficient": efficient,
        "num_responses": len(responses),
        "num_tokens": len(kl),
        "mean_kl": float(kl.mean()),
        "max_kl": float(kl.max()),
        "quantiles": {str(q): float(np.quantile(kl, q)) for q in (0.5, 0.9, 0.99)},
        "high_kl": high_kl,
        "num_high": int(high.sum()),
        "kinds": [
            {
                "kind": row["key"],
                "tokens": row["tokens"],
                "mean_kl": row["mean_kl"],
                "share": row["kl"] / total if total else 0.0,
                "num_high": row["num_high"],
            }
            for row in sorted(kinds, key=lambda row: KINDS.index(row["key"]))
        ],
        "by_relative_position": [
            _bin(row, row["key"] / _RELATIVE_BINS, (row["key"] + 1) / _RELATIVE_BINS)
            for row in relative
        ],
        "by_position": [_bin(row, _EDGES[row["key"]], _EDGES[row["key"] + 1]) for row in absolute],
        "words": [
            {"text": row["key"], "count": row["tokens"], "kl": row["kl"]}
            for row in by_kl[:NUM_WORDS]
        ],
        "largest": _largest(responses),
    }


def _means(
    keys: Sequence[Any] | np.ndarray, kl: np.ndarray, high: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """By key, in its order: tokens, sum and mean of their D_t, how many have a large one."""
    names, index = np.unique(np.asarray(keys), return_inverse=True)
    tokens, sums = np.bincount(index), np.bincount(index, kl)
    num_high = np.bincount(index, high)
    columns = (names, tokens, sums, sums / tokens, num_high.astype(int))
    found = zip(*(column.tolist() for column in columns), strict=True)
    return [
        dict(zip(("key", "tokens", "kl", "mean_kl", "num_high"), row, strict=True)) for row in found
    ]


def _bin(row: dict[str, Any], start: float, stop: float) -> dict[str, Any]:
    return {"start": start, "stop": stop, "tokens": row["tokens"], "mean_kl": row["mean_kl"]}


def _largest(responses: Sequence[DiagnosedResponse]) -> list[dict[str, Any]]:
    """The tokens of largest D_t, with what the efficient model prefers there."""

    def kl_of(found: tuple[DiagnosedResponse, Alternative]) -> float:
        return found[0].kl[found[1].position]

    every = ((each, other) for each in responses for other in each.alternatives)
    return [
        {
            "problem_id": each.problem_id,
            "sample_index": each.sample_index,
            "before": "".join(each.tokens[: other.position])[-_CONTEXT:],
            "text": each.tokens[other.position],
            "kl": each.kl[other.position],
            **asdict(other),
        }
        for each, other in heapq.nlargest(NUM_LARGEST, every, key=kl_of)
    ]


def _word(token: str) -> str:
    """What the cloud shows of a token: without the space around it, line breaks as a sign."""
    return token.strip() + _LINE_BREAK * token.count("\n") or " "
