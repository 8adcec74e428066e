"""What all methods have in common. A method is one class, in its file in `catalog/`: its fields are
the keys of its settings, its methods say what it does otherwise than the classes here.

`config.method` is an instance of one of them, chosen by its `name`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megatron_opsft.errors import UserError
from megatron_opsft.methods.advantages import Values, group_centered, group_normalized
from megatron_opsft.methods.dapo import DapoSettings
from megatron_opsft.methods.facts import Group, LengthTarget, PromptChange
from megatron_opsft.methods.objective import (
    LIKELIHOOD,
    Aggregation,
    KlEstimator,
    Likelihood,
    Objective,
    Surrogate,
    TokenClip,
)
from megatron_opsft.section import Section

PAPER_LIMIT = (
    3500  # L of the on-policy SFT paper; defaults in tokens suit about this length
)

# Keys of several methods, whose defaults differ.
AggregationKey = Annotated[
    Aggregation,
    Field(
        description="How token losses become one loss; docs/methods.md has the formulas."
    ),
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
    Field(
        ge=0,
        description="Weight of the divergence from the reference model; 0: none is kept.",
    ),
]
Kl = Annotated[
    KlEstimator,
    Field(
        description="Its estimator, d = log ref - log p: k1 -d, k2 d^2/2, k3 e^d - d - 1."
    ),
]
Samples = Annotated[
    int,
    Field(
        ge=1, description="Responses to each problem that fixed data are chosen from."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """What of a run a method must fit: G, B, and L in tokens."""

    group_size: int
    prompts_per_step: int
    max_response_tokens: int


class MethodState(Section):
    """What a method carries from step to step; in the checkpoint, as JSON.

    step: of the batch that comes next; the first is 1. refills: how many times problems were drawn
    beyond those of the steps.
    """

    step: int = Field(1, ge=1)
    refills: int = Field(0, ge=0)


State = Any  # An instance of the method's `state_class`.


class MethodSettings(Section):
    """A method: what a run has set, and what it does with responses.

        groups of responses -> rewards -> advantages -> weights and one factor (-> loss/)

    All of it is pure and the same on every rank: it sees facts of all groups of the batch and no
    token. What a method does not define is as here: likelihood of the accepted responses.

    formula, paper: for the table of methods; needs: what a run must have beyond a model and
    problems, in words. state: the method's before the step in question.

    per_token: keys that are lengths in tokens (1) or prices of a token (-1); their defaults hold
    where responses may have `fits_from` tokens or more. missable: key of a length that responses
    must be able to exceed.
    """

    formula: ClassVar[str]
    paper: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    state_class: ClassVar[type[MethodState]] = MethodState
    per_token: ClassVar[Mapping[str, Literal[1, -1]]] = {}
    fits_from: ClassVar[int] = 0
    missable: ClassVar[str] = ""

    name: str = "on_policy_sft"
    """The method; `megatron-opsft methods` lists them."""
    aggregation: AggregationKey = "accepted_tokens"

    @property
    def num_updates(self) -> int:
        """Optimizer steps on each rollout batch."""
        return getattr(self, "updates_per_batch", 1)

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

    def fitted(self, max_response_tokens: int) -> "MethodSettings":
        """Lengths and prices that nobody set, scaled where responses are too short for them."""
        if max_response_tokens >= self.fits_from:
            return self
        ratio = max_response_tokens / PAPER_LIMIT
        values = dict(self)
        for key in self.per_token.keys() - self.model_fields_set:
            is_length = self.per_token[key] > 0
            values[key] = (
                max(1, round(values[key] * ratio)) if is_length else values[key] / ratio
            )
        return type(self).model_construct(self.model_fields_set, **values)

    def check(self, run: RunSize) -> None:
        """Errors: `UserError`, one line, where a run does not fit the method."""
        if self.compares_group and run.group_size == 1:
            raise UserError(
                f"method.name={self.name} compares the responses to one problem, and "
                "rollout.group_size=1 leaves nothing to compare; set it to 2 or more"
            )
        num_tokens = getattr(self, self.missable) if self.missable else 0
        if num_tokens >= run.max_response_tokens:
            raise UserError(
                f"method.{self.missable}={num_tokens} is more than a response can have with "
                f"rollout.max_response_tokens={run.max_response_tokens}; lower it"
            )

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """Of each response to one problem: 1 if correct, finished, and no longer than the limit."""
        return group.within(group.limit)

    def rewards(self, batch: Sequence[Group], state: State) -> Values:
        """The rewards of a batch, one list a group."""
        return [self.group_rewards(group, state) for group in batch]

    def shaped(self, batch: Sequence[Group], rewards: Values) -> Values:
        """The rewards, with what a run adds to those of any method."""
        return rewards

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        """Of each response, from the shaped rewards of the batch."""
        return rewards

    def first_state(self) -> MethodState:
        """The state before the first step."""
        return self.state_class()

    def next_state(self, state: State, batch: Sequence[Group]) -> State:
        """The state after a step on `batch`; `MethodRun` counts steps and refills."""
        return state

    def limit(self, state: State) -> int | None:
        """The longest response in this step, in tokens; None: the run's own."""
        return None

    def starts_stage(self, state: State) -> bool:
        """Whether optimizer and reference model begin anew with this step."""
        return False

    def refreshes_teacher(self, state: State) -> bool:
        """Whether the teacher's weights are the model's again from this step on."""
        return False

    @property
    def renews_frozen_model(self) -> bool:
        """Whether one of these two ever says yes: checkpoints then hold the frozen model, too."""
        return False

    def target_length(
        self, problem_id: str, seed: int, *, held_out: bool = False
    ) -> LengthTarget | None:
        """The length that the prompt of a problem asks for."""
        return None

    def prompt(self, state: State, target: LengthTarget | None) -> PromptChange:
        """What a problem's prompt gets beyond the template."""
        return PromptChange()

    def monitor_size(self, state: State) -> tuple[int, int] | None:
        """(problems, responses to each) outside the batch that the method wants to see before this
        step, if any; before the first one, if at all.
        """
        return None

    def observe(self, state: State, groups: Sequence[Group]) -> State:
        """The state, with what the groups of the monitor problems say."""
        return state

    @property
    def most_refills(self) -> int:
        """How often problems are drawn again, at most, in place of groups that are not kept."""
        return getattr(self, "max_refills", 0)

    def keeps(self, group: Group, rewards: Sequence[float]) -> bool:
        """Whether to train on a group, by its own rewards, not shaped."""
        return True


class PolicySettings(DapoSettings, MethodSettings):
    """Methods with a policy gradient: clipped ratios, a divergence, several updates. Advantages are
    Dr. GRPO's: r - mean.
    """

    aggregation: AggregationKey = "all_tokens"
    clip_low: float = Field(0.2, ge=0, le=1)
    """A token's ratio to the old policy counts from 1 - this ..."""
    clip_high: ClipHigh = 0.2
    dual_clip: DualClip = None
    beta: Beta = 0.0
    kl: Kl = "k3"
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps on each rollout batch, on equal shares of its problems."""
    tempered_log_probs: bool = True
    """Log-probs are those of softmax(logits / rollout.temperature), the policy that samples; else
    of softmax(logits).
    """

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
            surrogate=self.surrogate,
            beta=self.beta,
            kl=self.kl,
            temperature=temperature,
        )

    def check(self, run: RunSize) -> None:
        """Errors: as of both bases, and where the problems cannot be shared out."""
        super().check(run)
        longest = 0 if self.has_fixed_data else run.max_response_tokens
        self.check_dapo(compares_group=self.compares_group, longest=longest)
        if run.prompts_per_step % self.updates_per_batch:
            raise UserError(
                f"method.updates_per_batch={self.updates_per_batch} does not divide "
                f"data.prompts_per_step={run.prompts_per_step}; choose a divisor"
            )

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """1 if correct."""
        return group.verdicts

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        return [group_centered(group) for group in rewards]


class GroupNormalizedSettings(PolicySettings):
    """Methods with GRPO's advantage: (r - mean) / std."""

    std_epsilon: float = Field(1e-6, ge=0)
    """Added to a group's standard deviation; verl 1e-6, TRL 1e-4."""

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        return [group_normalized(group, self.std_epsilon) for group in rewards]
