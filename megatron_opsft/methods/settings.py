"""What the settings of all methods have in common; each method's own are in its file in `catalog/`.

`config.method` is one of them, chosen by its `name`.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from megatron_opsft.config_section import Section
from megatron_opsft.errors import UserError
from megatron_opsft.methods.aggregation import Aggregation
from megatron_opsft.methods.objective import (
    LIKELIHOOD,
    KlEstimator,
    Likelihood,
    Objective,
    Surrogate,
    TokenClip,
)

# Keys of several methods, whose defaults differ.
AggregationKey = Annotated[
    Aggregation,
    Field(description="How token losses become one loss; docs/methods.md has the formulas."),
]
ClipHigh = Annotated[float, Field(ge=0, description="... to 1 + this.")]
DualClip = Annotated[
    float | None,
    Field(
        gt=1,
        description="Bound on the ratio by which a negative advantage is multiplied; null: none.",
    ),
]
Beta = Annotated[
    float,
    Field(ge=0, description="Weight of the divergence from the reference model; 0: none is kept."),
]
Kl = Annotated[
    KlEstimator,
    Field(description="Its estimator, d = log ref - log p: k1 -d, k2 d^2/2, k3 e^d - d - 1."),
]
Samples = Annotated[
    int, Field(ge=1, description="Responses to each problem that fixed data are chosen from.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """What of a run a method must fit: G, B, and L in tokens."""

    group_size: int
    prompts_per_step: int
    max_response_tokens: int


def check_reached(key: str, num_tokens: int, run: RunSize) -> None:
    """Errors: `UserError` for a length that every response keeps to."""
    if num_tokens >= run.max_response_tokens:
        raise UserError(
            f"method.{key}={num_tokens} is more than a response can have with "
            f"rollout.max_response_tokens={run.max_response_tokens}; lower it"
        )


class MethodState(Section):
    """What a method carries from step to step; in the checkpoint, as JSON.

    step: of the batch that comes next; the first is 1. refills: how many times problems were drawn
    beyond those of the steps.
    """

    step: int = Field(1, ge=1)
    refills: int = Field(0, ge=0)


class MethodSettings(Section):
    """Keys of every method."""

    name: str = Field(
        "on_policy_sft", description="The method; `megatron-opsft methods` lists them."
    )
    aggregation: AggregationKey = "accepted_tokens"

    @property
    def num_updates(self) -> int:
        """Optimizer steps on each rollout batch."""
        return 1

    @property
    def compares_group(self) -> bool:
        """Whether an advantage depends on the other responses to the problem."""
        return False

    @property
    def learns_from_rejected(self) -> bool:
        """Whether wrong, cut and long responses are trained on too."""
        return False

    @property
    def has_fixed_data(self) -> bool:
        """Whether nothing is sampled: responses and their advantages come from a file."""
        return False

    def objective(self, sampling_temperature: float) -> Objective:
        """What the loss makes of log-probabilities; see `loss/`."""
        return LIKELIHOOD

    def check(self, run: RunSize) -> None:
        """Errors: `UserError`, one line, where a run does not fit the method."""
        if self.compares_group and run.group_size == 1:
            raise UserError(
                f"method.name={self.name} compares the responses to one problem, and "
                "rollout.group_size=1 leaves nothing to compare; set it to 2 or more"
            )


class PolicySettings(MethodSettings):
    """Keys of methods with a policy gradient: clipped ratios, a divergence, several updates."""

    aggregation: AggregationKey = "all_tokens"
    clip_low: float = Field(
        0.2, ge=0, le=1, description="A token's ratio to the old policy counts from 1 - this ..."
    )
    clip_high: ClipHigh = 0.2
    dual_clip: DualClip = None
    beta: Beta = 0.0
    kl: Kl = "k3"
    updates_per_batch: int = Field(
        1,
        ge=1,
        description="Optimizer steps on each rollout batch, on equal shares of its problems.",
    )
    tempered_log_probs: bool = Field(
        True,
        description="Log-probs are those of softmax(logits / rollout.temperature), the policy that "
        "samples; else of softmax(logits).",
    )

    @property
    def num_updates(self) -> int:
        return self.updates_per_batch

    @property
    def compares_group(self) -> bool:
        return True

    @property
    def learns_from_rejected(self) -> bool:
        return True

    @property
    def surrogate(self) -> Surrogate:
        """In a batch's only update no ratio differs from 1: a clip would have likelihood's
        gradient, at a higher price.
        """
        if self.updates_per_batch == 1:
            return Likelihood()
        return TokenClip(low=self.clip_low, high=self.clip_high, dual=self.dual_clip)

    def objective(self, sampling_temperature: float) -> Objective:
        temperature = sampling_temperature if self.tempered_log_probs else 1.0
        return Objective(
            surrogate=self.surrogate, beta=self.beta, kl=self.kl, temperature=temperature
        )

    def check(self, run: RunSize) -> None:
        """Errors: as of `MethodSettings`, and where the problems cannot be shared out."""
        super().check(run)
        if run.prompts_per_step % self.updates_per_batch:
            raise UserError(
                f"method.updates_per_batch={self.updates_per_batch} does not divide "
                f"data.prompts_per_step={run.prompts_per_step}; choose a divisor"
            )


class GroupNormalizedSettings(PolicySettings):
    """Keys of methods with GRPO's advantage."""

    std_epsilon: float = Field(
        1e-6, ge=0, description="Added to a group's standard deviation; verl 1e-6, TRL 1e-4."
    )
