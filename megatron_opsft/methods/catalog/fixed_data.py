"""Cross-entropy on data that were made before: CRST, TokenSkip, StepEntropy, and the off-policy
variant of on-policy SFT.
"""

from typing import Literal

from megatron_opsft.methods.method import Method, as_rewarded, each_group
from megatron_opsft.methods.rewards import stored
from megatron_opsft.methods.settings import AggregationKey, MethodSettings


class FixedDataSettings(MethodSettings):
    """Keys of all of them."""

    @property
    def has_fixed_data(self) -> bool:
        return True


class CrstSettings(FixedDataSettings):
    """CRST."""

    name: Literal["crst"] = "crst"


class TokenSkipSettings(FixedDataSettings):
    """TokenSkip."""

    name: Literal["tokenskip"] = "tokenskip"


class StepEntropySettings(FixedDataSettings):
    """StepEntropy's first stage."""

    name: Literal["step_entropy"] = "step_entropy"


class OffPolicySftSettings(FixedDataSettings):
    """On-policy SFT's acceptance, on responses of the model of up to 50 steps before."""

    name: Literal["off_policy_sft"] = "off_policy_sft"
    aggregation: AggregationKey = "max_accepted"


CRST = Method(
    formula="cross-entropy on the shortest correct of N samples",
    paper="Self-Training Elicits Concise Reasoning, arXiv 2502.20122",
    settings=CrstSettings,
    reward=each_group(stored),
    advantage=as_rewarded,
    needs=("fixed data",),
)
TOKENSKIP = Method(
    formula="cross-entropy on correct samples without their least important tokens",
    paper="TokenSkip, arXiv 2502.12067",
    settings=TokenSkipSettings,
    reward=each_group(stored),
    advantage=as_rewarded,
    needs=("fixed data",),
)
STEP_ENTROPY = Method(
    formula="cross-entropy on correct samples without their 80 % of steps of least entropy",
    paper="CoT Compression via Step Entropy, arXiv 2508.03346",
    settings=StepEntropySettings,
    reward=each_group(stored),
    advantage=as_rewarded,
    needs=("fixed data",),
)
OFF_POLICY_SFT = Method(
    formula="on_policy_sft's loss on data of the model of up to 50 steps before, in rounds",
    paper="On-Policy Supervised Fine-Tuning for Efficient Reasoning",
    settings=OffPolicySftSettings,
    reward=each_group(stored),
    advantage=as_rewarded,
    needs=("fixed data",),
)
