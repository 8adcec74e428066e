"""The base class of all methods; `policy` has those of policy gradients.

A method is one class, in a file of `catalog/`. Its fields are the keys of `method` in a
configuration, and it overrides what it does differently from the classes here. `config.method` is
an instance, chosen by `name`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from megatron_opsft.errors import UserError
from megatron_opsft.methods.advantages import Values
from megatron_opsft.methods.facts import Group, LengthTarget, PromptChange
from megatron_opsft.methods.objective import LIKELIHOOD, Aggregation, Objective
from megatron_opsft.records import LengthOf, record
from megatron_opsft.section import Section

# L of the on-policy SFT paper. Defaults in tokens suit responses of about this length.
PAPER_LIMIT = 3500

# Keys of several methods, whose defaults differ.
AggregationKey = Annotated[
    Aggregation,
    Field(
        description="How token losses become one loss; docs/methods.md has the formulas."
    ),
]
Samples = Annotated[
    int,
    Field(
        ge=1, description="Responses to each problem that fixed data are chosen from."
    ),
]


@record
class RunSize:
    """The sizes of a run that a method must fit."""

    group_size: int
    """G, responses to each problem."""
    prompts_per_step: int
    """B, problems of a step."""
    max_response_tokens: int
    """L."""


class MethodState(Section):
    """What a method remembers from step to step; checkpoints hold it as JSON."""

    step: int = Field(1, ge=1)
    """The step that comes next."""
    refills: NonNegativeInt = 0
    """How many more batches of problems were drawn than there were steps."""


State = Any  # An instance of the method's `state_class`.


class MethodSettings(Section):
    """A method: its settings in a run, and what it does with responses.

        groups of responses -> rewards -> advantages -> weights and one factor (-> trainer/loss/)

    Everything is pure and the same on every rank: a method sees the groups of the whole batch, and
    no token. Where it overrides nothing, it is the likelihood of the accepted responses. `state` is
    the method's state before the step in question.
    """

    formula: ClassVar[str]
    """For the table of methods."""
    paper: ClassVar[str]
    """For the table of methods."""
    needs: ClassVar[tuple[str, ...]] = ()
    """What a run must have beyond a model and problems, in words."""
    state_class: ClassVar[type[MethodState]] = MethodState
    per_token: ClassVar[Mapping[str, Literal[1, -1]]] = {}
    """Keys that are lengths in tokens (1) or prices of a token (-1)."""
    fits_from: ClassVar[int] = 0
    """The defaults of `per_token` suit responses of this many tokens or more."""
    missable: ClassVar[str] = ""
    """Key of a length that responses must be able to exceed."""
    measures_length: ClassVar[bool] = False
    """True if rewards, advantages or the choice of data depend on how long responses are."""

    name: str = "on_policy_sft"
    """The method; `megatron-opsft methods` lists them."""
    aggregation: AggregationKey = "accepted_tokens"
    length_of: LengthOf = "response"
    """What the method's lengths, budgets, targets and penalties count: all tokens, or those of the
    thinking.
    """

    @model_validator(mode="after")
    def _has_what_it_measures(self) -> Self:
        if self.length_of == "response" or self.has_length:
            return self
        raise UserError(
            f"method.length_of={self.length_of}: method.name={self.name}, as it is set, has no "
            "length but rollout.max_response_tokens, which is of whole responses; leave the key out"
        )

    @property
    def has_length(self) -> bool:
        """True if the method, as it is set, depends on how long responses are."""
        return self.measures_length

    @property
    def num_updates(self) -> int:
        """Optimizer steps on each rollout batch."""
        return 1

    @property
    def compares_group(self) -> bool:
        """True if an advantage depends on the other responses to the problem."""
        return False

    @property
    def learns_from_rejected(self) -> bool:
        """True if wrong, cut off and long responses are trained on, too."""
        return False

    @property
    def has_fixed_data(self) -> bool:
        """True if responses and their advantages come from a file, and none are sampled."""
        return False

    @property
    def num_data_samples(self) -> int:
        """Responses to each problem that `data` samples to choose fixed data from."""
        return 1

    @property
    def teacher(self) -> str | None:
        """Prompt template of the teacher, if the method has one."""
        return None

    @property
    def reference_file(self) -> Path | None:
        """File of the reference model's lengths and accuracy, if the method needs one."""
        return None

    def objective(self, sampling_temperature: float) -> Objective:
        """The objective of the loss; see `trainer/loss/`."""
        return LIKELIHOOD

    def fitted(self, max_response_tokens: int) -> "MethodSettings":
        """Return a copy in which lengths and prices that the user did not set are scaled to short
        responses.
        """
        if max_response_tokens >= self.fits_from:
            return self
        ratio = max_response_tokens / PAPER_LIMIT
        values = dict(self)
        for key in self.per_token.keys() - self.model_fields_set:
            if self.per_token[key] > 0:
                values[key] = max(1, round(values[key] * ratio))
            else:
                values[key] /= ratio
        return type(self).model_construct(self.model_fields_set, **values)

    def check(self, run: RunSize) -> None:
        """Raise `UserError`, one line, if a run does not fit the method."""
        if self.compares_group and run.group_size == 1:
            raise UserError(
                f"method.name={self.name} compares the responses to one problem, and "
                "rollout.group_size=1 leaves nothing to compare; set it to 2 or more"
            )
        if not self.missable:
            return
        num_tokens = getattr(self, self.missable)
        if num_tokens >= run.max_response_tokens:
            raise UserError(
                f"method.{self.missable}={num_tokens} is more than a response can have with "
                f"rollout.max_response_tokens={run.max_response_tokens}; lower it"
            )

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """1 for each response that is correct, finished and no longer than the limit, else 0."""
        return group.within(group.limit)

    def rewards(self, batch: Sequence[Group], state: State) -> Values:
        """Rewards of a batch, one list for each group."""
        return [self.group_rewards(group, state) for group in batch]

    def shaped(self, group: Group, rewards: list[float]) -> list[float]:
        """Rewards of a group with what a run's settings add to those of any method."""
        return rewards

    def group_advantages(self, group: Group, rewards: list[float]) -> list[float]:
        """Advantages of a group, from its shaped rewards."""
        return rewards

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        """Advantages of a batch, from its shaped rewards."""
        return list(map(self.group_advantages, batch, rewards))

    def first_state(self) -> MethodState:
        """The state before the first step."""
        return self.state_class()

    def next_state(self, state: State, batch: Sequence[Group]) -> State:
        """The state after a step on `batch`; `MethodRun` counts steps and refills."""
        return state

    def limit(self, state: State) -> int | None:
        """Most tokens of a response in this step; None: the run's limit."""
        return None

    def starts_stage(self, state: State) -> bool:
        """True if the optimizer's moments and the reference model are reset before this step."""
        return False

    def refreshes_teacher(self, state: State) -> bool:
        """True if the model is copied into the teacher before this step."""
        return False

    @property
    def renews_frozen_model(self) -> bool:
        """True if `starts_stage` or `refreshes_teacher` ever is: checkpoints then hold the frozen
        model, too.
        """
        return False

    def target_length(
        self, problem_id: str, seed: int, *, held_out: bool = False
    ) -> LengthTarget | None:
        """The length that the prompt of a problem asks for; None if it asks for none."""
        return None

    def prompt(self, state: State, target: LengthTarget | None) -> PromptChange:
        """Text that the method adds to the prompt of a problem with this target."""
        return PromptChange()

    def monitor_size(self, state: State) -> tuple[int, int] | None:
        """How many extra problems to sample before this step, and how many responses to each.

        None: no problems. A method that ever wants some must want some before step 1.
        """
        return None

    def observe(self, state: State, groups: Sequence[Group]) -> State:
        """Return the state after the method has seen the groups of the monitor problems."""
        return state

    @property
    def most_refills(self) -> int:
        """How often, at most, problems are drawn again in place of groups that are not kept."""
        return 0

    def keeps(self, group: Group, rewards: Sequence[float]) -> bool:
        """True if the group is trained on. rewards: its own, before `shaped`."""
        return True
