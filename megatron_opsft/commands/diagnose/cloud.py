"""A word cloud: where each word of a picture stands, and how large it is.

The largest word stands in the middle; each smaller one takes the first free position on a spiral
around it. Nothing is drawn by chance: the same words give the same picture.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_opsft.commands.report.chart import CLOUD_WIDTH, Word

_LARGEST = 44.0  # font size, in units of the picture
_SMALLEST = 11.0  # font size that can be read on a phone
# Characters that are about half as wide as others.
_HALF_WIDTHS = frozenset("iljtfrI.,:;!|'()[] ")
_TURN = 0.35  # radians between two positions on the spiral
_STEP = 1.1  # units outwards a radian of the spiral
_FLATNESS = 0.62  # of the spiral: a picture is wider than it is high


class _Box(NamedTuple):
    """The rectangle of a word, in units of the picture; y grows downwards."""

    text: str
    size: float
    """Of the font."""
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, box: "_Box") -> bool:
        """Return True if the two have a common area."""
        return (
            self.left < box.right
            and box.left < self.right
            and self.top < box.bottom
            and box.top < self.bottom
        )


def lay_out(weights: Mapping[str, float]) -> tuple[list[Word], float]:
    """Return the words of a cloud, the largest first, and how high it is.

    weights: word -> its weight (> 0). The area of a word's letters grows with its weight, down to
    the smallest font.
    """
    boxes: list[_Box] = []
    heaviest = max(weights.values(), default=1.0)
    for text, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        size = max(_SMALLEST, _LARGEST * math.sqrt(weight / heaviest))
        # No word is cut off.
        size = min(size, size * (CLOUD_WIDTH - 8) / _text_width(text, size))
        boxes.append(_free_box(text, size, boxes))
    top = min((box.top for box in boxes), default=0.0) - 4
    height = round(max((box.bottom for box in boxes), default=0.0) + 4 - top, 1)
    words = [
        Word(
            text=box.text,
            x=round((box.left + box.right) / 2, 1),
            y=round(box.bottom - 0.28 * box.size - top, 1),
            size=round(box.size, 1),
            room=round(box.right - box.left, 1),
        )
        for box in boxes
    ]
    return words, height


def _text_width(text: str, size: float) -> float:
    """Return about how wide the letters are, rather too much than too little."""
    return size * max(sum(map(_character_width, text)), 0.5)


def _character_width(character: str) -> float:
    """Return the width of a character in a font of size 1."""
    if character in _HALF_WIDTHS:
        return 0.36
    return 0.66 if character.isascii() else 1.05


def _free_box(text: str, size: float, taken: Sequence[_Box]) -> _Box:
    """Return the first box from the middle outwards that overlaps none of `taken`.

    A box that would stand outside of the picture, left or right, moves to its edge: above and below
    there is always room.
    """
    half_width = _text_width(text, size) / 2 + 2
    half_height = 0.6 * size
    angle = 0.0
    while True:
        x = CLOUD_WIDTH / 2 + _STEP * angle * math.cos(angle)
        x = min(max(x, half_width), CLOUD_WIDTH - half_width)
        y = _FLATNESS * _STEP * angle * math.sin(angle)
        box = _Box(
            text=text,
            size=size,
            left=x - half_width,
            top=y - half_height,
            right=x + half_width,
            bottom=y + half_height,
        )
        if not any(map(box.overlaps, taken)):
            return box
        angle += _TURN
