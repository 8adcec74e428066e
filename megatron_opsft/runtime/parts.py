"""Things in a row, in parts of a limited size."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def in_parts(
    items: Iterable[T], size_of: Callable[[T], int], limit: int
) -> list[list[T]]:
    """In order, in parts of at most `limit` together; a larger item is a part of its own."""
    parts: list[list[T]] = []
    room = 0
    for item in items:
        size = size_of(item)
        if size > room or not parts:
            parts.append([])
            room = limit
        parts[-1].append(item)
        room -= size
    return parts
