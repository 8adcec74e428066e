"""DAPO's two additions to any policy gradient (arXiv 2503.14476): draw other problems in place of
groups whose rewards are all equal, and lower the rewards of responses near the length limit.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from megatron_opsft.errors import UserError
from megatron_opsft.methods.advantages import Values
from megatron_opsft.methods.facts import Group
from megatron_opsft.section import Section

MaxRefills = Annotated[
    int,
    Field(
        ge=0,
        description="How often problems are drawn again, at most, in place of groups of equal "
        "rewards; a batch that is not full then stays smaller. 0: never.",
    ),
]


class DapoSettings(Section):
    """Keys of both, which are off by default.

    Whether a group is kept is decided before the overlong penalty is applied.
    """

    max_refills: MaxRefills = 0
    overlong_buffer: int = Field(0, ge=0)
    """Over this many tokens before the length limit every reward falls, right or wrong, in a
    straight line (DAPO); 0: none falls.
    """
    overlong_penalty: float = Field(1.0, ge=0)
    """What a reward loses at the limit, by method.overlong_buffer."""

    def keeps(self, group: Group, rewards: Sequence[float]) -> bool:
        """True if the rewards differ, or if the run draws no problems again."""
        return not self.max_refills or min(rewards) < max(rewards)

    def shaped(self, batch: Sequence[Group], rewards: Values) -> Values:
        """Add penalty x R_len to every reward, R_len between 0 and -1 (equation 13)."""
        if not self.overlong_buffer:
            return rewards
        shaped = []
        for group, group_rewards in zip(batch, rewards, strict=True):
            scores = overlong(group, self.overlong_buffer)
            shaped.append(
                [
                    reward + self.overlong_penalty * score
                    for reward, score in zip(group_rewards, scores, strict=True)
                ]
            )
        return shaped

    def check_dapo(self, *, compares_group: bool, longest: int) -> None:
        """Check both keys against the run.

        longest: most tokens of a sampled response. Errors: `UserError` for refills with a method
        that also learns from equal rewards, and for a buffer longer than any response.
        """
        if self.max_refills and not compares_group:
            raise UserError(
                f"method.max_refills={self.max_refills} replaces groups of equal rewards, and the "
                "method learns from these as well; set it to 0"
            )
        if self.overlong_buffer > longest:
            raise UserError(
                f"method.overlong_buffer={self.overlong_buffer} is more than the {longest} tokens "
                "that a sampled response can have; lower it"
            )


def overlong(group: Group, buffer: int) -> list[float]:
    """R_len of each response: 0 up to `buffer` tokens before the limit, falling to -1 at it."""
    free = group.limit - buffer
    return [min(max((free - length) / buffer, -1.0), 0.0) for length in group.lengths]
