"""Responses with marks as a person sets them: those of tests/data/planted_responses.txt, and more
from templates with random numbers.
"""

import random
import re
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent.parent / "data" / "planted_responses.txt"
FOUND, MISSED, MISTAKEN = "‸", "¿", "¡"
DOUBT, LEAK_START, LEAK_END = "†", "⟦", "⟧"

# A name, the gold answer and a response; every number is told apart from the others by `_draw`.
TEMPLATES = (
    (
        "sum in prose",
        "{sum}",
        "<think>\nOkay, so there are {a} girls and {b} boys. In total, that makes {sum}‸ children."
        " †Wait, let me check: {a} + {b} = {sum}‸.\n</think>\n"
        "There are \\boxed{{{sum}‸}} children.",
    ),
    (
        "sum in LaTeX",
        "{sum}",
        "To add them, we compute\n\\[ {a} + {b} = {sum}‸ \\]\n"
        "Therefore, the sum of \\({a}\\) and \\({b}\\) is \\(\\boxed{{{sum}‸}}\\).",
    ),
    (
        "difference",
        "{difference}",
        "Tom has {sum} coins and spends {b} + {a} - {difference} of them."
        " So he has {difference}‸ coins left.\n#### {difference}‸",
    ),
    (
        "product, corrected",
        "{product}",
        "{a} times {b} is {wrong}, so the answer is {wrong}. †Wait, that's not right."
        " {a} * {b} = {product}‸. So it's {product}‸.\n\\boxed{{{product}‸}}",
    ),
    (
        "fraction",
        "\\frac{{{a}}}{{{b}}}",
        "So $x = \\frac{{{a}}}{{{b}}}‸$. †Let me verify: {b}x = {a}. So x is {a}/{b}‸.\n"
        "\\[\\boxed{{\\frac{{{a}}}{{{b}}}‸}}\\]",
    ),
    (
        "negative number",
        "-{a}",
        "The sum is zero, so x + {a} = 0 and x = -{a}‸. Not {a}.\n\\boxed{{-{a}‸}}",
    ),
    (
        "point",
        "({a}, {b})",
        "The first coordinate is {a}, and the second is {b}. So the point is ({a}, {b})‸."
        " †Hmm, wait, let me check again. Yes, ({a},{b})¿.\n\\boxed{{({a}, {b})‸}}",
    ),
    (
        "money",
        "{product}",
        "He pays {a} dollars for each of the {b} books, so he pays {a} x {b} = ${product}‸ in"
        " total.\nThe answer is {product}‸.",
    ),
    (
        "Chinese",
        "{sum}",
        "<think>\n{a}+{b}={sum}‸，所以一共有{sum}‸个。†等等，再检查一下。对的。\n</think>\n"
        "答案是\\boxed{{{sum}‸}}。",
    ),
    (
        "polynomial",
        "{a}x+{b}",
        "Collecting terms, we get ${a}x + {b}‸$. Hence, the expression is $\\boxed{{{a}x+{b}‸}}$.",
    ),
)


class Planted(NamedTuple):
    """A response and its marks; places are counts of characters of `text`."""

    name: str
    gold: str
    text: str
    """The response, without marks."""
    ends: list[int]
    """Where the statements end that the meter finds."""
    doubts: list[int]
    """Where turns of self-doubt begin."""
    leak: tuple[int, int] | None
    """The thinking behind `</think>`."""


def planted_responses() -> list[Planted]:
    """Return all of them."""
    cases = []
    for part in re.split(r"^== ", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, _, marked = part.partition("\n")
        name, gold = heading.split(" | ", 1)
        cases.append(read_marks(name, gold, marked.strip("\n")))
    return [*cases, *_draw()]


def _draw(times: int = 4) -> list[Planted]:
    """Return each template several times, with numbers of which no two are equal."""
    rng = random.Random(7)
    cases = []
    for number in range(times):
        for name, gold, marked in TEMPLATES:
            a, b = rng.choice([7, 8, 11, 14]), rng.choice([13, 17, 19, 23, 29, 31])  # coprime
            numbers = {"sum": a + b, "difference": b - a, "product": a * b, "wrong": a * b + 10}
            numbers |= {"a": a, "b": b}
            cases.append(
                read_marks(f"{name} {number}", gold.format(**numbers), marked.format(**numbers))
            )
    return cases


def read_marks(name: str, gold: str, marked: str) -> Planted:
    """Return the response of a marked text."""
    text = ""
    places: dict[str, list[int]] = {mark: [] for mark in "‸¿¡†⟦⟧"}
    for character in marked:
        if character in places:
            places[character].append(len(text))
        else:
            text += character
    leak = (places[LEAK_START][0], places[LEAK_END][0]) if places[LEAK_START] else None
    ends = sorted(places[FOUND] + places[MISTAKEN])
    return Planted(name, gold, text, ends, places[DOUBT], leak)
