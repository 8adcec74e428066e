"""The embedded task: seeded word problems that add and subtract two to four small numbers.

A problem is a tuple of signed terms told as a short story. A hash of the terms alone decides
whether it belongs to training or to testing, so the splits share no problem, whatever the names and
objects of the story.
"""

import hashlib
import random
from collections.abc import Iterator
from itertools import accumulate
from typing import Literal

from megatron_opsft.errors import UserError
from megatron_opsft.records import Problem, record

Split = Literal["train", "test"]

# The terms. Partial sums are in 1..LARGEST: one digit, like every number of a story.
SMALLEST = 2
LARGEST = 9
NUM_TERMS = (2, 3, 3, 4, 4)  # the number of terms is drawn from these
TEST_SHARE = 8  # one tuple of terms in eight is a test problem
# Testing has 216 tuples of terms, told in many ways.
NUM_PROBLEMS = {"train": 8192, "test": 1024}

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
GAINS = (
    "buys",
    "finds",
    "gets",
    "wins",
    "makes",
    "collects",
)
LOSSES = (
    "loses",
    "sells",
    "drops",
    "breaks",
    "lends",
    "mails",
)


@record
class WordProblem:
    """A story and its arithmetic: the answer is the sum of the terms.

    Every partial sum is in 1..LARGEST, and the answer is none of the numbers in the story.
    """

    terms: tuple[int, ...]
    """The numbers that the story adds, negative for a loss; the first is positive."""
    text: str

    @property
    def partials(self) -> tuple[int, ...]:
        """The sums of the first one, two, ... terms; the last is the answer."""
        return tuple(accumulate(self.terms))

    @property
    def answer(self) -> int:
        return sum(self.terms)


def split_of(terms: tuple[int, ...]) -> Split:
    """Return the split that owns these terms: a fixed hash, the same for all seeds and stories."""
    text = ",".join(map(str, terms))
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_SHARE == 0 else "train"


def draw_terms(rng: random.Random, split: Split) -> tuple[int, ...]:
    """Draw signed terms of the split that keep the promises of `WordProblem`."""
    while True:
        numbers = [rng.randint(SMALLEST, LARGEST) for _ in range(rng.choice(NUM_TERMS))]
        terms = numbers[:1]
        for number in numbers[1:]:
            sign = rng.choice((1, -1))
            terms.append(sign * number)
        partials = list(accumulate(terms))
        in_range = min(partials) >= 1 and max(partials) <= LARGEST
        if in_range and partials[-1] not in numbers and split_of(tuple(terms)) == split:
            return tuple(terms)


def tell(rng: random.Random, terms: tuple[int, ...]) -> str:
    """Tell a story of the terms, in the order in which they are added."""
    name = rng.choice(NAMES)
    objects = rng.choice(OBJECTS)
    changes = []
    for term in terms[1:]:
        verb = rng.choice(GAINS if term > 0 else LOSSES)
        changes.append(f"{verb} {abs(term)}")
    joint = rng.choice((" and then ", ", then "))
    story = joint.join(changes)
    if rng.random() < 0.5:
        story = f"{name} has {terms[0]} {objects} and {story}."
    else:
        story = f"{name} starts with {terms[0]} {objects}. Then {name} {story}."
    questions = (
        f"How many {objects} does {name} have now?",
        f"How many {objects} are there now?",
        "How many are there in the end?",
    )
    return f"{story} {rng.choice(questions)}"


def draw_problems(split: Split, *, seed: int) -> Iterator[WordProblem]:
    """Yield problems of the split without end, the same for the same seed. Texts may repeat."""
    rng = random.Random(f"{split}-{seed}")
    while True:
        terms = draw_terms(rng, split)
        yield WordProblem(terms=terms, text=tell(rng, terms))


def load_arithmetic(split: Split) -> list[Problem]:
    """Return the first `NUM_PROBLEMS` different problems of the split's stream.

    Errors: `UserError` for an unknown split.
    """
    if split not in NUM_PROBLEMS:
        raise UserError(f"arithmetic has no split '{split}': use train or test")
    answers: dict[str, int] = {}
    stream = draw_problems(split, seed=0)
    while len(answers) < NUM_PROBLEMS[split]:
        problem = next(stream)
        answers[problem.text] = problem.answer
    return [
        Problem(
            id=f"arithmetic-{split}-{index}",
            text=text,
            answer=str(answer),
            row=index + 1,
        )
        for index, (text, answer) in enumerate(answers.items())
    ]
