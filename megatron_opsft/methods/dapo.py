"""What DAPO (arXiv 2503.14476) adds to any policy gradient: problems drawn again in place of groups
that teach nothing, and rewards that fall near the length limit.
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
    """Both are off unless a run asks for them. A group is judged by rewards that do not fall."""

    max_refills: MaxRefills = 0
    overlong_buffer: int = Field(0, ge=0)
    """Over this many tokens before the length limit every reward falls, right or wrong, in a
    straight line (DAPO); 0: none falls.
    """
    overlong_penalty: float = Field(1.0, ge=0)
    """What a reward loses at the limit, by method.overlong_buffer."""

    def keeps(self, group: Group, rewards: Sequence[float]) -> bool:
        """Whether the rewards differ; every group where problems are not drawn again."""
        return not self.max_refills or min(rewards) < max(rewards)

    def shaped(self, batch: Sequence[Group], rewards: Values) -> Values:
        """r + penalty R_len of every response, R_len between 0 and -1 (equation 13)."""
        if not self.overlong_buffer:
            return rewards
        scores = [overlong(group, self.overlong_buffer) for group in batch]
        return [
            [
                reward + self.overlong_penalty * score
                for reward, score in zip(*pair, strict=True)
            ]
            for pair in zip(rewards, scores, strict=True)
        ]

    def check_dapo(self, *, compares_group: bool, longest: int) -> None:
        """longest: tokens of a response that is sampled. Errors: `UserError` for refills where no
        group teaches nothing, and for a buffer that no response has room for.
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
    """R_len: 0 until `buffer` tokens before the limit, from there down to -1 at it and beyond."""
    free = group.limit - buffer
    return [min(max((free - length) / buffer, -1.0), 0.0) for length in group.lengths]
