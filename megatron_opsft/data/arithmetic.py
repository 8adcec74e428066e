"""The embedded task: seeded word problems that add and subtract two to four small numbers.

A problem is a tuple of signed terms told as a short story. A hash of the terms alone decides
whether it belongs to training or to testing, so the splits share no problem, whatever the names and
objects of the story.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from megatron_opsft.errors import UserError
from megatron_opsft.records import Problem

Split = Literal["train", "test"]

SMALLEST, LARGEST = (
    2,
    9,
)  # terms; partial sums are in 1..LARGEST, one digit like every number
NUM_TERMS = (2, 3, 3, 4, 4)  # one is drawn
TEST_SHARE = 8  # one tuple of terms in eight is a test problem
NUM_PROBLEMS = {
    "train": 8192,
    "test": 1024,
}  # testing has 216 tuples of terms, told in many ways

NAMES = (
    "Tom",
    "Mia",
    "Ben",
    "Ana",
    "Leo",
    "Eva",
    "Sam",
    "Zoe",
    "Max",
    "Lily",
    "Jack",
    "Emma",
)
OBJECTS = (
    "apples",
    "books",
    "coins",
    "pens",
    "cards",
    "eggs",
    "shells",
    "stamps",
    "plums",
    "keys",
)
GAINS = ("buys", "finds", "gets", "wins", "makes", "collects")
LOSSES = ("loses", "sells", "drops", "breaks", "lends", "mails")


@dataclass(frozen=True, slots=True, kw_only=True)
class WordProblem:
    """A story and its arithmetic: the answer is the sum of `terms`, the first of which is positive.

    Every partial sum is in 1..LARGEST, and the answer is none of the numbers in the story.
    """

    terms: tuple[int, ...]
    text: str

    @property
    def partials(self) -> tuple[int, ...]:
        """The running sums after each term; the last is the answer."""
        return tuple(accumulate(self.terms))

    @property
    def answer(self) -> int:
        return sum(self.terms)


def split_of(terms: tuple[int, ...]) -> Split:
    """The split that owns these terms: a fixed hash, the same for all seeds and stories."""
    digest = hashlib.blake2b(",".join(map(str, terms)).encode(), digest_size=4).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_SHARE == 0 else "train"


def draw_terms(rng: random.Random, split: Split) -> tuple[int, ...]:
    """Signed terms of the split that keep the promises of `WordProblem`."""
    while True:
        numbers = [rng.randint(SMALLEST, LARGEST) for _ in range(rng.choice(NUM_TERMS))]
        terms = (numbers[0], *(rng.choice((1, -1)) * number for number in numbers[1:]))
        partials = list(accumulate(terms))
        in_range = min(partials) >= 1 and max(partials) <= LARGEST
        if in_range and partials[-1] not in numbers and split_of(terms) == split:
            return terms


def tell(rng: random.Random, terms: tuple[int, ...]) -> str:
    """A story for the terms, in the order in which they are added."""
    name, objects = rng.choice(NAMES), rng.choice(OBJECTS)
    changes = [
        f"{rng.choice(GAINS if term > 0 else LOSSES)} {abs(term)}" for term in terms[1:]
    ]
    joint = rng.choice((" and then ", ", then "))
    if rng.random() < 0.5:
        story = f"{name} has {terms[0]} {objects} and {joint.join(changes)}."
    else:
        story = f"{name} starts with {terms[0]} {objects}. Then {name} {joint.join(changes)}."
    questions = (
        f"How many {objects} does {name} have now?",
        f"How many {objects} are there now?",
        "How many are there in the end?",
    )
    return f"{story} {rng.choice(questions)}"


def draw_problems(split: Split, *, seed: int) -> Iterator[WordProblem]:
    """An endless stream of problems of the split; the same for the same seed. Texts may repeat."""
    rng = random.Random(f"{split}-{seed}")
    while True:
        terms = draw_terms(rng, split)
        yield WordProblem(terms=terms, text=tell(rng, terms))


def load_arithmetic(split: Split) -> list[Problem]:
    """The first different problems of the split's stream, `NUM_PROBLEMS`. Errors: `UserError` for
    an unknown split.
    """
    if split not in NUM_PROBLEMS:
        raise UserError(f"arithmetic has no split '{split}': use train or test")
    answers: dict[str, int] = {}
    for problem in draw_problems(split, seed=0):
        answers[problem.text] = problem.answer
        if len(answers) == NUM_PROBLEMS[split]:
            break
    return [
        Problem(
            id=f"arithmetic-{split}-{index}",
            text=text,
            answer=str(answer),
            row=index + 1,
        )
        for index, (text, answer) in enumerate(answers.items())
    ]
