"""Methods whose reward for length follows the batch's accuracy: A-DLP and Short-RL."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from megatron_opsft.methods.advantages import Values
from megatron_opsft.methods.facts import Group, accuracy_of
from megatron_opsft.methods.policy import Beta, GroupNormalizedSettings
from megatron_opsft.methods.settings import MethodState


class ADlpState(MethodState):
    """The price of the next step."""

    price: float
    """Lambda, reward lost with each token."""


class ADlp(GroupNormalizedSettings):
    """A-DLP: a price for each token, which rises and falls with the batch's accuracy."""

    formula = "r = 1[correct] - lambda n, lambda += eta (accuracy - reference)"
    paper = "A-DLP, arXiv 2505.18298"
    state_class = ADlpState
    measures_length = True
    per_token = {"first_price": -1, "price_rate": -1}
    # A response of this length can cost as much as a right answer brings.
    fits_from = 1000
    name: Literal["a_dlp"] = "a_dlp"
    beta: Beta = 0.001
    first_price: NonNegativeFloat = 1e-3
    """Lambda of the first step, a token."""
    price_rate: NonNegativeFloat = 1e-3
    """How fast lambda follows accuracy."""
    reference_accuracy: float = Field(0.62, ge=0, le=1)
    """Accuracy above which lambda rises: the starting model's."""

    def first_state(self) -> ADlpState:
        return ADlpState(price=self.first_price)

    def group_rewards(self, group: Group, state: ADlpState) -> list[float]:
        """c - lambda n."""
        pairs = zip(group.verdicts, group.lengths, strict=True)
        return [verdict - state.price * length for verdict, length in pairs]

    def next_state(self, state: ADlpState, batch: Sequence[Group]) -> ADlpState:
        """lambda <- max(0, lambda + eta (accuracy - reference))."""
        excess = accuracy_of(batch) - self.reference_accuracy
        price = state.price + self.price_rate * excess
        return state.model_copy(update={"price": max(0.0, price)})


class ShortRlState(MethodState):
    """The accuracy that a batch is compared with."""

    best_accuracy: float = 0.0
    """Of all batches so far."""


class ShortRl(GroupNormalizedSettings):
    """Short-RL: a length reward for correct responses, while a batch is as accurate as the best."""

    formula = (
        "correct: r = 1.5 - (n - min)+/(max - min), only while accuracy >= best - tol"
    )
    paper = "Short-RL, arXiv 2505.12284"
    state_class = ShortRlState
    measures_length = True
    per_token = {"length_tolerance": 1}
    fits_from = 101
    name: Literal["short_rl"] = "short_rl"
    beta: Beta = 0.001
    length_tolerance: NonNegativeInt = 100
    """Tokens beyond the shortest at no cost."""
    accuracy_tolerance: NonNegativeFloat = 0.05
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
        for index, length in enumerate(group.lengths):
            if rewards[index]:
                extra_tokens = length - min(lengths)
                bonus = 0.5
                if extra_tokens > self.length_tolerance:
                    bonus -= extra_tokens / (max(lengths) - min(lengths))
                rewards[index] += bonus
        return rewards

    def next_state(self, state: ShortRlState, batch: Sequence[Group]) -> ShortRlState:
        """Remember the best accuracy, this batch's included."""
        best = max(state.best_accuracy, accuracy_of(batch))
        return state.model_copy(update={"best_accuracy": best})
