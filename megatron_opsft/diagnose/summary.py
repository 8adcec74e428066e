"""summary.json of a diagnosis: D_t by kind of token and by position, and where it is large."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_opsft.diagnose.kinds import KINDS, kinds_of
from megatron_opsft.report.diagnosis import DiagnosedResponse

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
    kl = np.concatenate([each.kl for each in responses])
    high_kl = float(np.quantile(kl, HIGH_QUANTILE))
    high = (kl >= high_kl) & (kl > 0)
    total = float(kl.sum())
    kinds = np.array([kind for each in responses for kind in kinds_of(each.tokens)])
    by_kind = _sums(kinds, kl)
    lengths = [len(each.tokens) for each in responses]
    positions = np.concatenate([np.arange(n) for n in lengths])
    relative = np.concatenate([np.arange(n) * _RELATIVE_BINS // n for n in lengths])
    absolute = np.searchsorted(_EDGES, positions, side="right") - 1
    words = [_word(token) for each in responses for token in each.tokens]
    by_word = _sums(np.array(words, dtype=object)[high], kl[high])
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
                "kind": kind,
                "tokens": by_kind[kind][0],
                "mean_kl": by_kind[kind][1] / by_kind[kind][0],
                "share": by_kind[kind][1] / total if total else 0.0,
                "num_high": int((high & (kinds == kind)).sum()),
            }
            for kind in KINDS
            if kind in by_kind
        ],
        "by_relative_position": _bins(relative, kl, np.arange(_RELATIVE_BINS + 1) / _RELATIVE_BINS),
        "by_position": _bins(absolute, kl, np.array(_EDGES)),
        "words": [
            {"text": word, "count": count, "kl": of_word}
            for word, (count, of_word) in sorted(by_word.items(), key=lambda w: (-w[1][1], w[0]))
        ][:NUM_WORDS],
        "largest": _largest(responses),
    }


def _sums(keys: np.ndarray, kl: np.ndarray) -> dict[Any, tuple[int, float]]:
    """By key, in its order: how many tokens have it, and the sum of their D_t."""
    names, index = np.unique(keys, return_inverse=True)
    found = zip(np.bincount(index).tolist(), np.bincount(index, kl).tolist(), strict=True)
    return dict(zip(names.tolist(), found, strict=True))


def _bins(index: np.ndarray, kl: np.ndarray, edges: np.ndarray) -> list[dict[str, Any]]:
    """index: the bin of each token. edges: where each begins, and where the last ends."""
    starts = edges.tolist()
    return [
        {"start": starts[n], "stop": starts[n + 1], "tokens": tokens, "mean_kl": of_bin / tokens}
        for n, (tokens, of_bin) in _sums(index, kl).items()
    ]


def _largest(responses: Sequence[DiagnosedResponse]) -> list[dict[str, Any]]:
    """The tokens of largest D_t, with what the efficient model prefers there."""
    every = ((each, other) for each in responses for other in each.alternatives)
    falling = sorted(every, key=lambda found: -found[0].kl[found[1].position])
    return [
        {
            "problem_id": each.problem_id,
            "sample_index": each.sample_index,
            "before": "".join(each.tokens[: other.position])[-_CONTEXT:],
            "text": each.tokens[other.position],
            "kl": each.kl[other.position],
            **asdict(other),
        }
        for each, other in falling[:NUM_LARGEST]
    ]


def _word(token: str) -> str:
    """What the cloud shows of a token: without the space around it, line breaks as a sign."""
    return token.strip() + _LINE_BREAK * token.count("\n") or " "
