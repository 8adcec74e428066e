"""Methods that train on data made beforehand, with cross-entropy: CRST, TokenSkip, StepEntropy,
STOP, and the off-policy variant of on-policy SFT.
"""

from typing import Literal

from pydantic import Field

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.settings import (
    AggregationKey,
    MethodSettings,
    Samples,
    State,
)


class FixedDataSettings(MethodSettings):
    """Settings of all: the advantage of a response is what its row of the data says."""

    needs = ("fixed data",)

    @property
    def has_fixed_data(self) -> bool:
        return True

    def group_rewards(self, group: Group, state: State) -> list[float]:
        return group.stored_advantages


class Crst(FixedDataSettings):
    """CRST's settings."""

    formula = "cross-entropy on the shortest correct of N samples"
    paper = "Self-Training Elicits Concise Reasoning, arXiv 2502.20122"
    measures_length = True
    name: Literal["crst"] = "crst"
    samples: Samples = 16

    @property
    def num_data_samples(self) -> int:
        return self.samples


class TokenSkip(FixedDataSettings):
    """TokenSkip's settings."""

    formula = "cross-entropy on correct samples without their least important tokens"
    paper = "TokenSkip, arXiv 2502.12067"
    name: Literal["tokenskip"] = "tokenskip"
    ratio: float | None = Field(None, gt=0, le=1)
    """Share of the reasoning's tokens to keep; null: drawn for each problem from 0.5, 0.6, ..., 1.
    """
    scorer: str = Field(
        "microsoft/llmlingua-2-xlm-roberta-large-meetingbank", min_length=1
    )
    """Token classifier by which llmlingua chooses words (LLMLingua-2; pip install '.[tokenskip]').
    """
    delimiter: str = Field("<|eot_id|>", min_length=1)
    """Around the ratio, at the end of the prompt; a ratio of 1 is not stated."""


class StepEntropy(FixedDataSettings):
    """Settings of StepEntropy's first stage."""

    formula = (
        "cross-entropy on correct samples without their 80 % of steps of least entropy"
    )
    paper = "CoT Compression via Step Entropy, arXiv 2508.03346"
    name: Literal["step_entropy"] = "step_entropy"
    share: float = Field(0.8, ge=0, le=1)
    """Share of the steps of least entropy that become [SKIP]."""
    separator: str = Field("\n\n", min_length=1)
    """Text of the token between steps."""
    answer_tokens: int = Field(1024, ge=1)
    """Longest answer behind the shortened thinking; responses that leave no room for it are left
    out.
    """


class Stop(FixedDataSettings):
    """STOP's settings."""

    formula = "cross-entropy on correct samples whose thinking ends with the first right answer"
    paper = "STOP, arXiv 2605.13165"
    measures_length = True
    name: Literal["stop"] = "stop"
    samples: Samples = 4

    @property
    def num_data_samples(self) -> int:
        return self.samples


class OffPolicySft(FixedDataSettings):
    """Settings of on-policy SFT on responses of the model of up to 50 steps before."""

    formula = (
        "on_policy_sft's loss on data of the model of up to 50 steps before, in rounds"
    )
    paper = "On-Policy Supervised Fine-Tuning for Efficient Reasoning"
    name: Literal["off_policy_sft"] = "off_policy_sft"
    aggregation: AggregationKey = "max_accepted"
    samples: Samples = 8

    @property
    def num_data_samples(self) -> int:
        return self.samples
