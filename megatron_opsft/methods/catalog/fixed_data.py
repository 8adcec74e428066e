"""Cross-entropy on data that were made before: CRST, TokenSkip, StepEntropy, and the off-policy
variant of on-policy SFT.
"""

from typing import Literal

from pydantic import Field

from megatron_opsft.methods.method import Method, as_rewarded, each_group
from megatron_opsft.methods.rewards import stored
from megatron_opsft.methods.settings import AggregationKey, MethodSettings, Samples

SELF = "self"  # instead of the name of TokenSkip's scorer


class FixedDataSettings(MethodSettings):
    """Keys of all of them."""

    @property
    def has_fixed_data(self) -> bool:
        return True


class CrstSettings(FixedDataSettings):
    """CRST."""

    name: Literal["crst"] = "crst"
    samples: Samples = 16


class TokenSkipSettings(FixedDataSettings):
    """TokenSkip."""

    name: Literal["tokenskip"] = "tokenskip"
    ratio: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the reasoning's tokens to keep; null: drawn for each problem from "
        "0.5, 0.6, ..., 1.",
    )
    scorer: str = Field(
        "microsoft/llmlingua-2-xlm-roberta-large-meetingbank",
        min_length=1,
        description="Token classifier by which llmlingua chooses words (LLMLingua-2; pip install "
        "'.[tokenskip]'), or self: words by the model's own self-information.",
    )
    delimiter: str = Field(
        "<|eot_id|>",
        min_length=1,
        description="Around the ratio, at the end of the prompt; a ratio of 1 is not told.",
    )


class StepEntropySettings(FixedDataSettings):
    """StepEntropy's first stage."""

    name: Literal["step_entropy"] = "step_entropy"
    share: float = Field(
        0.8, ge=0, le=1, description="Share of the steps of least entropy that become [SKIP]."
    )
    score: Literal["sum", "mean"] = Field(
        "sum",
        description="A step's entropy. sum: of its tokens' distributions, the paper's; mean: of "
        "-p log p of its tokens, the code's.",
    )
    separator: str = Field("\n\n", min_length=1, description="Text of the token between steps.")
    answer_tokens: int = Field(
        1024,
        ge=1,
        description="Longest answer behind the shortened thinking; responses that leave no room "
        "for it are left out.",
    )


class OffPolicySftSettings(FixedDataSettings):
    """On-policy SFT's acceptance, on responses of the model of up to 50 steps before."""

    name: Literal["off_policy_sft"] = "off_policy_sft"
    aggregation: AggregationKey = "max_accepted"
    samples: Samples = 8


def _method(formula: str, paper: str, settings: type[FixedDataSettings]) -> Method:
    """A response counts what its row says; `data` has done the rest."""
    return Method(
        formula=formula,
        paper=paper,
        settings=settings,
        reward=each_group(stored),
        advantage=as_rewarded,
        needs=("fixed data",),
    )


CRST = _method(
    "cross-entropy on the shortest correct of N samples",
    "Self-Training Elicits Concise Reasoning, arXiv 2502.20122",
    CrstSettings,
)
TOKENSKIP = _method(
    "cross-entropy on correct samples without their least important tokens",
    "TokenSkip, arXiv 2502.12067",
    TokenSkipSettings,
)
STEP_ENTROPY = _method(
    "cross-entropy on correct samples without their 80 % of steps of least entropy",
    "CoT Compression via Step Entropy, arXiv 2508.03346",
    StepEntropySettings,
)
OFF_POLICY_SFT = _method(
    "on_policy_sft's loss on data of the model of up to 50 steps before, in rounds",
    "On-Policy Supervised Fine-Tuning for Efficient Reasoning",
    OffPolicySftSettings,
)
