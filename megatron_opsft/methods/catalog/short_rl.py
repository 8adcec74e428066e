"""Short-RL: a length reward for correct responses, while the batch is as accurate as the best."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.advantages import Values
from megatron_opsft.methods.facts import Group, accuracy_of
from megatron_opsft.methods.settings import Beta, GroupNormalizedSettings, MethodState


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
        least_accuracy = state.best_accuracy - self.accuracy_tolerance
        pays_bonus = accuracy_of(batch) >= least_accuracy
        rewards = []
        for group in batch:
            group_rewards = group.verdicts
            if pays_bonus:
                for i, response in enumerate(group.responses):
                    if response.correct:
                        group_rewards[i] += length_bonus(
                            response.num_tokens, group, self.length_tolerance
                        )
            rewards.append(group_rewards)
        return rewards

    def next_state(self, state: ShortRlState, batch: Sequence[Group]) -> ShortRlState:
        """Remember the best accuracy, this batch's included."""
        best = max(state.best_accuracy, accuracy_of(batch))
        return state.model_copy(update={"best_accuracy": best})


def length_bonus(length: int, group: Group, tolerance: int) -> float:
    """1/2 near the shortest correct response, else 1/2 - (n - min)/(max - min) of correct ones."""
    shortest, longest = min(group.correct_lengths), max(group.correct_lengths)
    if length - shortest <= tolerance:
        return 0.5
    return 0.5 - (length - shortest) / (longest - shortest)
