"""A word cloud: where each word of a picture stands, and how large it is.

The largest word stands in the middle; each smaller one takes the first free place on a spiral
around it. Nothing is drawn by chance: the same words give the same picture.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_opsft.commands.report.chart import CLOUD_WIDTH, Word

_LARGEST, _SMALLEST = (
    44.0,
    11.0,
)  # font sizes, in units; the smallest can be read on a phone
_HALF_WIDTHS = frozenset(
    "iljtfrI.,:;!|'()[] "
)  # characters that are about half as wide as others
_TURN, _STEP = (
    0.35,
    1.1,
)  # of the spiral: radians from place to place, units outwards a radian
_FLATNESS = 0.62  # of the spiral: a picture is wider than it is high


@dataclass(frozen=True, slots=True)
class _Box:
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "_Box") -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def lay_out(weights: Mapping[str, float]) -> tuple[list[Word], float]:
    """The words of a cloud, the largest first, and how high it is. weights: word -> its weight
    (> 0). The area of a word's letters grows with its weight, down to the smallest font.
    """
    taken: list[_Box] = []
    placed: list[tuple[str, float, _Box]] = []
    heaviest = max(weights.values(), default=1.0)
    for text, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        size = max(_SMALLEST, _LARGEST * math.sqrt(weight / heaviest))
        size = min(
            size, size * (CLOUD_WIDTH - 8) / _text_width(text, size)
        )  # no word is cut off
        box = _free_place(text, size, taken)
        taken.append(box)
        placed.append((text, size, box))
    top = min((box.top for box in taken), default=0.0) - 4
    height = round(max((box.bottom for box in taken), default=0.0) + 4 - top, 1)
    words = [
        Word(
            text=text,
            x=round((box.left + box.right) / 2, 1),
            y=round(box.bottom - 0.28 * size - top, 1),
            size=round(size, 1),
            room=round(box.right - box.left, 1),
        )
        for text, size, box in placed
    ]
    return words, height


def _text_width(text: str, size: float) -> float:
    """About as wide as the letters are, rather too much than too little."""
    ems = sum(
        0.36 if character in _HALF_WIDTHS else 0.66 if character.isascii() else 1.05
        for character in text
    )
    return size * max(ems, 0.5)


def _free_place(text: str, size: float, taken: Sequence[_Box]) -> _Box:
    """The first place from the middle outwards where the word overlaps no other. What would be
    outside of the picture, left or right, moves to its edge: above and below there is always room.
    """
    half_width, half_height = _text_width(text, size) / 2 + 2, 0.6 * size
    angle = 0.0
    while True:
        across = CLOUD_WIDTH / 2 + _STEP * angle * math.cos(angle)
        across = min(max(across, half_width), CLOUD_WIDTH - half_width)
        down = _FLATNESS * _STEP * angle * math.sin(angle)
        box = _Box(
            across - half_width,
            down - half_height,
            across + half_width,
            down + half_height,
        )
        if not any(box.overlaps(other) for other in taken):
            return box
        angle += _TURN
