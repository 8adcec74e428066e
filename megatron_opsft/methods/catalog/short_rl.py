"""Short-RL: a length reward for correct responses, while the batch is about as accurate as ever."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.advantages import Values
from megatron_opsft.methods.facts import Group, accuracy_of
from megatron_opsft.methods.settings import Beta, GroupNormalizedSettings, MethodState


class ShortRlState(MethodState):
    """best_accuracy: of the batches so far."""

    best_accuracy: float = 0.0


class ShortRl(GroupNormalizedSettings):
    """Short-RL."""

    formula = (
        "correct: r = 1.5 - (n - min)+/(max - min), only while accuracy >= best - tol"
    )
    paper = "Short-RL, arXiv 2505.12284"
    state_class = ShortRlState
    per_token = {"length_tolerance": 1}
    fits_from = 101
    name: Literal["short_rl"] = "short_rl"
    beta: Beta = 0.001
    length_tolerance: int = Field(100, ge=0)
    """Tokens beyond the shortest at no cost."""
    accuracy_tolerance: float = Field(0.05, ge=0)
    """How far below the best batch a batch's accuracy may be."""

    def rewards(self, batch: Sequence[Group], state: ShortRlState) -> Values:
        """c, and the bonus of correct ones if the batch is accurate enough."""
        is_open = accuracy_of(batch) >= state.best_accuracy - self.accuracy_tolerance

        def reward(length: int, lengths: Sequence[int]) -> float:
            """The bonus: 1/2 near the shortest of `lengths`, else 1/2 - (n - min)/(max - min)."""
            beyond, spread = length - min(lengths), max(lengths) - min(lengths)
            lost = beyond / spread if beyond > self.length_tolerance else 0.0
            return 1.0 + is_open * (0.5 - lost)

        return [
            [
                reward(r.num_tokens, g.correct_lengths) if r.correct else 0.0
                for r in g.responses
            ]
            for g in batch
        ]

    def next_state(self, state: ShortRlState, batch: Sequence[Group]) -> ShortRlState:
        """The best accuracy, this batch's included."""
        best = max(state.best_accuracy, accuracy_of(batch))
        return state.model_copy(update={"best_accuracy": best})
