"""A word cloud: where each word of a picture stands, and how large it is.

The largest word stands in the middle; each smaller one takes the first free position on a spiral
around it. Nothing is drawn by chance: the same words give the same picture.
"""

import math
from collections.abc import Mapping, Sequence

from megatron_opsft.commands.report.chart import CLOUD_WIDTH, Word

_LARGEST = 44.0  # font size, in units of the picture
_SMALLEST = 11.0  # font size that can be read on a phone
# Characters that are about half as wide as others.
_HALF_WIDTHS = frozenset("iljtfrI.,:;!|'()[] ")
_TURN = 0.35  # radians between two positions on the spiral
_STEP = 1.1  # units outwards a radian of the spiral
_HALF_HEIGHT = 0.6  # half the height of a word's box, as a share of its font size
_BASELINE = (
    0.32  # how far the baseline is below the middle, as a share of the font size
)
_FLATNESS = (
    0.62  # height of the spiral over its width: a picture is wider than it is high
)


def lay_out(weights: Mapping[str, float]) -> tuple[list[Word], float]:
    """Return the words of a cloud, the largest first, and how high it is.

    weights: word -> its weight (> 0). The area of a word's letters grows with its weight, down to
    the smallest font.
    """
    placed: list[Word] = []  # their y is that of the middle, not yet of the baseline
    heaviest = max(weights.values(), default=1.0)
    for text, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        size = max(_SMALLEST, _LARGEST * math.sqrt(weight / heaviest))
        # A word that is too wide for the picture is made smaller.
        size = min(size, size * (CLOUD_WIDTH - 8) / _text_width(text, size))
        placed.append(_place(text, size, placed))
    top = min((word.y - _HALF_HEIGHT * word.size for word in placed), default=0.0) - 4
    bottom = max((word.y + _HALF_HEIGHT * word.size for word in placed), default=0.0)
    words = [
        Word(
            text=word.text,
            x=round(word.x, 1),
            y=round(word.y + _BASELINE * word.size - top, 1),
            size=round(word.size, 1),
            room=round(word.room, 1),
        )
        for word in placed
    ]
    return words, round(bottom + 4 - top, 1)


def _text_width(text: str, size: float) -> float:
    """Return about how wide the letters are, rather too much than too little."""
    return size * max(sum(map(_character_width, text)), 0.5)


def _character_width(character: str) -> float:
    """Return the width of a character in a font of size 1."""
    if character in _HALF_WIDTHS:
        return 0.36
    return 0.66 if character.isascii() else 1.05


def _place(text: str, size: float, placed: Sequence[Word]) -> Word:
    """Return the word at the first place from the middle outwards where it overlaps none of
    `placed`.

    A word that would stand outside of the picture, left or right, moves to its edge: above and
    below there is always room.
    """
    room = _text_width(text, size) + 4
    angle = 0.0
    while True:
        x = CLOUD_WIDTH / 2 + _STEP * angle * math.cos(angle)
        x = min(max(x, room / 2), CLOUD_WIDTH - room / 2)
        y = _FLATNESS * _STEP * angle * math.sin(angle)
        word = Word(text=text, x=x, y=y, size=size, room=room)
        if not any(_overlap(word, other) for other in placed):
            return word
        angle += _TURN


def _overlap(one: Word, other: Word) -> bool:
    """Return True if the boxes of two words have a common area. Their y is that of the middle."""
    return (
        abs(one.x - other.x) < (one.room + other.room) / 2
        and abs(one.y - other.y) < (one.size + other.size) * _HALF_HEIGHT
    )
