"""Short-RL: a length reward for correct responses, while the batch is as accurate as the best."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.advantages import Values
from megatron_opsft.methods.facts import Group, accuracy_of
from megatron_opsft.methods.policy import Beta, GroupNormalizedSettings
from megatron_opsft.methods.settings import MethodState


class ShortRlState(MethodState):
    """The accuracy that a batch is compared with."""

    best_accuracy: float = 0.0
    """Of all batches so far."""


class ShortRl(GroupNormalizedSettings):
    """Short-RL's settings."""

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
        """1[correct], plus the length bonus if the batch is accurate enough."""
        if accuracy_of(batch) < state.best_accuracy - self.accuracy_tolerance:
            return [group.verdicts for group in batch]
        return super().rewards(batch, state)

    def group_rewards(self, group: Group, state: ShortRlState) -> list[float]:
        """1[correct], plus 1/2 near the shortest correct response, else 1/2 - (n - min)/(max - min)
        of correct ones.
        """
        rewards, lengths = group.verdicts, group.correct_lengths
        for i, response in enumerate(group.responses):
            if not response.correct:
                continue
            beyond = response.num_tokens - min(lengths)
            bonus = 0.5
            if beyond > self.length_tolerance:
                bonus -= beyond / (max(lengths) - min(lengths))
            rewards[i] += bonus
        return rewards

    def next_state(self, state: ShortRlState, batch: Sequence[Group]) -> ShortRlState:
        """Remember the best accuracy, this batch's included."""
        best = max(state.best_accuracy, accuracy_of(batch))
        return state.model_copy(update={"best_accuracy": best})
