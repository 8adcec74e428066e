"""Rewards that several methods start from; one of a group each."""

from typing import Any

from megatron_opsft.methods.facts import Group


def verdict(group: Group, settings: Any, state: Any) -> list[float]:
    """1 if correct, else 0."""
    return [float(response.correct) for response in group.responses]


def truncation(group: Group, settings: Any, state: Any) -> list[float]:
    """1 if correct, finished, and no longer than the limit, else 0."""
    return [
        float(r.correct and r.finished and r.num_tokens <= group.limit) for r in group.responses
    ]


def stored(group: Group, settings: Any, state: Any) -> list[float]:
    """What a fixed data set says."""
    return [response.advantage for response in group.responses]
