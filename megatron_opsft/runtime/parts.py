"""Items in a row, split into batches of a limited size."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def in_parts(
    items: Iterable[T], size_of: Callable[[T], int], limit: int
) -> list[list[T]]:
    """Split the items, in order, into batches whose sizes add up to at most `limit`.

    An item that is larger than `limit` gets a batch of its own.
    """
    batches: list[list[T]] = []
    room = 0
    for item in items:
        size = size_of(item)
        if size > room or not batches:
            batches.append([])
            room = limit
        batches[-1].append(item)
        room -= size
    return batches
