"""DLER: truncation, an advantage whitened over the batch, and problems drawn again in place of
groups that teach nothing. With `easy_limit` it is DA-DLER.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.advantages import Values, whiten
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.method import Method, Refill, centered, each_group
from megatron_opsft.methods.settings import Beta, ClipHigh, Kl, MethodState, PolicySettings


class DlerSettings(PolicySettings):
    """As in the paper; the code's KL is k3 by default."""

    name: Literal["dler"] = "dler"
    clip_high: ClipHigh = 0.28
    beta: Beta = 0.0005
    kl: Kl = "k2"
    whiten: Literal["responses", "tokens"] = Field(
        "tokens",
        description="Whether a response counts once, or with each of its tokens: the code.",
    )
    max_refills: int = Field(
        8,
        ge=0,
        description="How often problems are drawn again to fill a batch; then it is smaller.",
    )
    easy_limit: int | None = Field(
        None, ge=1, description="DA-DLER: length limit where enough responses are correct."
    )
    easy_pass_rate: float = Field(0.5, ge=0, le=1, description="... which is this share.")


def dler_reward(group: Group, settings: DlerSettings, state: MethodState) -> list[float]:
    """1 if correct within the limit."""
    limit = group.limit
    if settings.easy_limit is not None and group.pass_rate >= settings.easy_pass_rate:
        limit = settings.easy_limit
    return [float(r.correct and r.finished and r.num_tokens <= limit) for r in group.responses]


def dler_advantage(batch: Sequence[Group], rewards: Values, settings: DlerSettings) -> Values:
    """r - mean, then whitened over the batch."""
    lengths = [group.lengths for group in batch]
    return whiten(centered(batch, rewards, settings), lengths, settings.whiten)


def is_mixed(settings: DlerSettings, group: Group) -> bool:
    """Whether neither all nor none of the responses are rewarded."""
    return 0 < sum(dler_reward(group, settings, MethodState())) < len(group.responses)


DLER = Method(
    formula="r = 1[correct and n <= L]; A = whitened over the batch (r - mean)",
    paper="DLER, arXiv 2510.15110",
    settings=DlerSettings,
    reward=each_group(dler_reward),
    advantage=dler_advantage,
    refill=Refill(keeps=is_mixed, at_most=lambda settings: settings.max_refills),
)
