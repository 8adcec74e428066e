"""On-policy SFT: likelihood of what is correct and short."""

from typing import Literal

from pydantic import Field

from megatron_opsft.methods.method import Method, as_rewarded, each_group
from megatron_opsft.methods.rewards import truncation
from megatron_opsft.methods.settings import MethodSettings


class OnPolicySftSettings(MethodSettings):
    """Algorithm 1."""

    name: Literal["on_policy_sft"] = "on_policy_sft"
    aggregation: Literal["max_accepted", "accepted_tokens", "sequence"] = Field(
        "max_accepted",
        description="max_accepted: 1/(B G M), the paper's; sequence: 1/|o|, its ablation; "
        "accepted_tokens: 1/sum |o|, the released code's.",
    )


ON_POLICY_SFT = Method(
    formula="A = 1[correct and n <= L], likelihood",
    paper="On-Policy Supervised Fine-Tuning for Efficient Reasoning",
    settings=OnPolicySftSettings,
    reward=each_group(truncation),
    advantage=as_rewarded,
)
