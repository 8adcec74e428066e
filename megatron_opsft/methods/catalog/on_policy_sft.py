"""On-policy SFT: the likelihood of responses that are correct and short."""

from typing import Literal

from megatron_opsft.methods.settings import MethodSettings


class OnPolicySft(MethodSettings):
    """Settings of Algorithm 1."""

    formula = "A = 1[correct and n <= L], likelihood"
    paper = "On-Policy Supervised Fine-Tuning for Efficient Reasoning"
    name: Literal["on_policy_sft"] = "on_policy_sft"
    aggregation: Literal["max_accepted", "accepted_tokens", "sequence"] = "max_accepted"
    """max_accepted: 1/(B G M), the paper's; sequence: 1/|o|, its ablation; accepted_tokens: 1/sum
    |o|, the released code's.
    """
