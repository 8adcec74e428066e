"""GFPO: of the responses to a problem the short or the efficient ones are kept, and compared."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.errors import UserError
from megatron_opsft.methods.advantages import Values, group_normalized
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.settings import GroupNormalizedSettings, RunSize


class Gfpo(GroupNormalizedSettings):
    """GFPO."""

    formula = "A = (r - mean)/std of the k shortest responses, or of largest r/n; 0 of the others"
    paper = "GFPO, arXiv 2508.09726"
    name: Literal["gfpo"] = "gfpo"
    kept: int = Field(4, ge=2)
    """k: how many responses to each problem are kept."""
    keep_by: Literal["length", "reward_per_token"] = "length"
    """The shortest are kept, or those with most reward a token."""

    def check(self, run: RunSize) -> None:
        """Errors: as of `PolicySettings`, and for more kept than there are."""
        super().check(run)
        if self.kept > run.group_size:
            raise UserError(
                f"method.kept={self.kept} is more than the responses to a problem, "
                f"rollout.group_size={run.group_size}; lower it"
            )

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        return [
            self.among_kept(g.lengths, r) for g, r in zip(batch, rewards, strict=True)
        ]

    def among_kept(
        self, lengths: Sequence[int], rewards: Sequence[float]
    ) -> list[float]:
        """(r - mean)/std over the kept ones, std by their count; 0 of the others."""
        scores: Sequence[float] = lengths
        if self.keep_by == "reward_per_token":
            scores = [-r / n for r, n in zip(rewards, lengths, strict=True)]
        kept = sorted(range(len(scores)), key=scores.__getitem__)[: self.kept]
        among = group_normalized(
            [rewards[i] for i in kept], self.std_epsilon, count_less=0
        )
        found = dict(zip(kept, among, strict=True))
        return [found.get(i, 0.0) for i in range(len(rewards))]
