"""Word clouds: every word is whole, none covers another, and heavier ones are larger."""

import random

import pytest

from megatron_opsft.commands.diagnose.cloud import lay_out
from megatron_opsft.commands.report.chart import CLOUD_WIDTH, Word

WORDS = ["Wait", "Alternatively", "Hmm", "I", "me", "</think>", "但是", "\\n", "so", "7"]


def boxes_of(words: list[Word]) -> list[tuple[float, float, float, float]]:
    """(left, top, right, bottom) of each word's letters, narrower than they are drawn at most."""
    return [
        (
            word.x - 0.2 * word.size * len(word.text),
            word.y - 0.7 * word.size,
            word.x + 0.2 * word.size * len(word.text),
            word.y + 0.1 * word.size,
        )
        for word in words
    ]


@pytest.mark.parametrize("count", [1, 2, 60])
def test_words_are_inside_and_apart_and_heavier_ones_larger(count: int) -> None:
    draw = random.Random(count)
    weights = {f"{draw.choice(WORDS)}{n}": draw.paretovariate(1.0) for n in range(count)}
    words, height = lay_out(weights)
    placed = [weights[word.text] for word in words]
    assert len(words) == count and placed == sorted(weights.values(), reverse=True)
    sizes = [word.size for word in words]
    assert sizes == sorted(sizes, reverse=True)
    boxes = boxes_of(words)
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= CLOUD_WIDTH and 0 <= top < bottom <= height
    for number, (left, top, right, bottom) in enumerate(boxes):
        for other_left, other_top, other_right, other_bottom in boxes[:number]:
            beside = right <= other_left or other_right <= left
            assert beside or bottom <= other_top or other_bottom <= top
    assert lay_out(weights) == (words, height)


def test_letters_cover_an_area_as_large_as_the_weight() -> None:
    four, one, tiny = lay_out({"wait": 4.0, "but": 1.0, "so": 0.001})[0]
    assert four.size == 2 * one.size == 44.0
    assert tiny.size == 11.0  # what can still be read on a phone


@pytest.mark.parametrize("length", [12, 25, 200])
def test_many_wide_words_stand_below_each_other(length: int) -> None:
    words, height = lay_out({f"{number:02d}{'-' * (length - 2)}": 1.0 for number in range(60)})
    assert len(words) == 60
    places = sorted(((word.x, word.y) for word in words), key=lambda place: place[1])
    assert len({*places}) == 60 and places[-1][1] < height


def test_a_long_word_is_whole_and_no_word_is_a_small_picture() -> None:
    [(word,), _] = lay_out({"a" * 60: 1.0})
    assert 0 < word.size < 10 and word.x == pytest.approx(CLOUD_WIDTH / 2)
    assert word.room <= CLOUD_WIDTH and lay_out({}) == ([], 8)
