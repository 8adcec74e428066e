"""A-DLP: a price for each token, which rises and falls with the batch's accuracy."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.facts import Group, accuracy_of
from megatron_opsft.methods.policy import Beta, GroupNormalizedSettings
from megatron_opsft.methods.settings import MethodState


class ADlpState(MethodState):
    """The price of the next step."""

    price: float
    """Lambda, reward lost with each token."""


class ADlp(GroupNormalizedSettings):
    """A-DLP's settings."""

    formula = "r = 1[correct] - lambda n, lambda += eta (accuracy - reference)"
    paper = "A-DLP, arXiv 2505.18298"
    state_class = ADlpState
    per_token = {"first_price": -1, "price_rate": -1}
    # A response of this length can cost as much as a right answer brings.
    fits_from = 1000
    name: Literal["a_dlp"] = "a_dlp"
    beta: Beta = 0.001
    first_price: float = Field(1e-3, ge=0)
    """Lambda of the first step, a token."""
    price_rate: float = Field(1e-3, ge=0)
    """How fast lambda follows accuracy."""
    reference_accuracy: float = Field(0.62, ge=0, le=1)
    """Accuracy above which lambda rises: the starting model's."""

    def first_state(self) -> ADlpState:
        return ADlpState(price=self.first_price)

    def group_rewards(self, group: Group, state: ADlpState) -> list[float]:
        """c - lambda n."""
        return [r.correct - state.price * r.num_tokens for r in group.responses]

    def next_state(self, state: ADlpState, batch: Sequence[Group]) -> ADlpState:
        """lambda <- max(0, lambda + eta (accuracy - reference))."""
        better = accuracy_of(batch) - self.reference_accuracy
        price = state.price + self.price_rate * better
        return state.model_copy(update={"price": max(0.0, price)})
