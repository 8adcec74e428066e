"""prime-rl's linear length penalty."""

from typing import Literal

from pydantic import Field

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.method import Method, centered, each_group
from megatron_opsft.methods.settings import MethodState, PolicySettings


class LinearSettings(PolicySettings):
    """prime-rl's `linear`."""

    name: Literal["linear"] = "linear"
    weight: float = Field(0.25, ge=0, description="Of the length penalty.")


def linear_reward(group: Group, settings: LinearSettings, state: MethodState) -> list[float]:
    """c - w pass_rate n / max n."""
    price = settings.weight * group.pass_rate / max(group.lengths)
    return [response.correct - price * response.num_tokens for response in group.responses]


LINEAR = Method(
    formula="r = 1[correct] - 0.25 pass_rate n/max n; A = r - mean",
    paper="prime-rl, pull request 2901",
    settings=LinearSettings,
    reward=each_group(linear_reward),
    advantage=centered,
)
