"""Which problems a step trains on: a function of (seed, step) alone, the same on every rank."""

import random
from dataclasses import dataclass
from functools import lru_cache

from megatron_opsft.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSampler:
    """Epoch after epoch in a new order; a batch continues into the next epoch where one ends.

    Stateless: resuming needs the step number only. With fewer problems than `batch_size` a batch
    repeats some.
    """

    num_problems: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_problems < 1:
            raise UserError("data: there are no problems to draw from")
        if self.batch_size < 1:
            raise UserError(f"data.prompts_per_step: {self.batch_size} is too few; use at least 1")

    def indices(self, step: int) -> list[int]:
        """The `batch_size` problem indices of a step, counted from 0, in order."""
        first = step * self.batch_size
        drawn = []
        for position in range(first, first + self.batch_size):
            epoch, offset = divmod(position, self.num_problems)
            drawn.append(_permutation(self.seed, epoch, self.num_problems)[offset])
        return drawn


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_problems: int) -> tuple[int, ...]:
    order = list(range(num_problems))
    random.Random(f"epoch:{seed}:{epoch}").shuffle(order)  # a generator of its own, seeded by text
    return tuple(order)
