"""Problems taken out of the training data to evaluate on."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace

from megatron_opsft.data.problems import ProblemSet
from megatron_opsft.errors import UserError


def take_held_out(problem_set: ProblemSet, num: int, seed: int) -> tuple[ProblemSet, ProblemSet]:
    """(what is left to train on, `num` problems drawn with `seed`); all rows of one text are on one
    side. Errors: `UserError` where nothing would be left.
    """
    texts = list(dict.fromkeys(problem.text for problem in problem_set.problems))
    if num >= len(texts):
        raise UserError(
            f"eval.holdout={num}: {problem_set.name} has only {len(texts)} different problems; "
            "take fewer"
        )
    held = set(random.Random(f"holdout:{seed}").sample(texts, num))
    sides: tuple[list[int], list[int]] = ([], [])
    for index, problem in enumerate(problem_set.problems):
        sides[problem.text in held].append(index)
    train, test = (_pick(problem_set, indices, f"{num}:{seed}") for indices in sides)
    return train, replace(test, name=f"{problem_set.name} (held out)", bad_rows=())


def _pick(problem_set: ProblemSet, indices: Sequence[int], how: str) -> ProblemSet:
    described = f"{problem_set.sha256} {how} {list(indices)}".encode()
    return problem_set.pick(indices, sha256=hashlib.sha256(described).hexdigest())
