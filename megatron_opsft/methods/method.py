"""A method as one record: what it rewards, how rewards become advantages, and what else it needs.

    groups of responses -> rewards -> advantages -> weights and one factor (-> loss/)

All of it is pure and the same on every rank: it sees facts of all groups of the batch and no token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron_opsft.methods.advantages import Values, group_centered, group_normalized
from megatron_opsft.methods.aggregation import aggregate
from megatron_opsft.methods.facts import Group, LengthTarget, PromptChange
from megatron_opsft.methods.settings import (
    GroupNormalizedSettings,
    MethodSettings,
    MethodState,
)

GroupReward = Callable[[Group, Any, Any], list[float]]
Reward = Callable[[Sequence[Group], Any, Any], Values]
Advantage = Callable[[Sequence[Group], Values, Any], Values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Of every response of a batch, group by group. token_weights: of each of its tokens; factor:
    of the whole sum; trained: whether it takes part in the update at all.
    """

    rewards: tuple[float, ...]
    advantages: tuple[float, ...]
    token_weights: tuple[float, ...]
    trained: tuple[bool, ...]
    factor: float


def each_group(reward: GroupReward) -> Reward:
    """The reward of a batch from one of a group: (group, settings, state) -> rewards."""

    def of_batch(batch: Sequence[Group], settings: Any, state: Any) -> Values:
        return [reward(group, settings, state) for group in batch]

    return of_batch


def normalized(
    batch: Sequence[Group], rewards: Values, settings: GroupNormalizedSettings
) -> Values:
    """GRPO's advantage."""
    return [group_normalized(group, settings.std_epsilon) for group in rewards]


def as_rewarded(batch: Sequence[Group], rewards: Values, settings: Any) -> Values:
    """A = r."""
    return rewards


def centered(batch: Sequence[Group], rewards: Values, settings: Any) -> Values:
    """Dr. GRPO's advantage."""
    return [group_centered(group) for group in rewards]


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """Problems outside the batch that a method looks at from time to time.

    due: (settings, state) -> before this step; observe: (settings, state, groups) -> state; size:
    settings -> (problems, responses to each).
    """

    due: Callable[[Any, Any], bool]
    observe: Callable[[Any, Any, Sequence[Group]], MethodState]
    size: Callable[[Any], tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """Groups that teach nothing are dropped, and problems drawn again in their place.

    keeps: (settings, group) -> whether to train on it; at_most: settings -> draws beyond the first.
    """

    keeps: Callable[[Any, Group], bool]
    at_most: Callable[[Any], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """formula, paper: for the table of methods. settings, state: their types.

    reward, advantage: (groups, settings, state) and (groups, rewards, settings) -> one list a
    group. needs: what a run must have beyond a model and problems, in words.
    first: the first state, from the settings; updated: the next one, from (settings, state, groups
    of the batch).
    limit: (settings, state) -> the longest response in this step, None for the run's own;
    starts_stage: (settings, state) -> whether optimizer and reference begin anew.
    target: (settings, problem id, seed) -> the length that the prompt asks for, evaluation_target
    that of a held-out problem; prompt: (settings, state, target) -> what the prompt gets.
    """

    formula: str
    paper: str
    settings: type[MethodSettings]
    reward: Reward
    advantage: Advantage = normalized
    needs: tuple[str, ...] = ()
    state: type[MethodState] = MethodState
    first: Callable[[Any], MethodState] | None = None
    updated: Callable[[Any, Any, Sequence[Group]], MethodState] | None = None
    limit: Callable[[Any, MethodState], int | None] = lambda settings, state: None
    starts_stage: Callable[[Any, MethodState], bool] = lambda settings, state: False
    target: Callable[[Any, str, int], LengthTarget | None] = lambda settings, problem, seed: None
    evaluation_target: Callable[[Any, str, int], LengthTarget | None] = (
        lambda settings, problem, seed: None
    )
    prompt: Callable[[Any, MethodState, LengthTarget | None], PromptChange] = (
        lambda settings, state, target: PromptChange()
    )
    monitor: Monitor | None = None
    refill: Refill | None = None

    @property
    def name(self) -> str:
        """What `method.name` calls it."""
        return str(self.settings.model_fields["name"].default)

    def weigh(
        self, batch: Sequence[Group], settings: MethodSettings, state: MethodState
    ) -> Weights:
        """What each response of the batch counts. Pure, so every rank gets the same numbers.

        A response without advantage is trained on only for its divergence from the reference.
        """
        rewards = self.reward(batch, settings, state)
        advantages = self.advantage(batch, rewards, settings)
        flat = tuple(chain.from_iterable(advantages))
        lengths = [length for group in batch for length in group.lengths]
        accepted = [advantage != 0 for advantage in flat]
        limit = max(group.limit for group in batch)
        token_weights, factor = aggregate(settings.aggregation, lengths, accepted, limit)
        diverges = settings.objective(1.0).needs_reference
        trained = tuple(kept or diverges for kept in accepted)
        return Weights(
            rewards=tuple(chain.from_iterable(rewards)),
            advantages=flat,
            token_weights=token_weights,
            trained=trained,
            factor=factor if any(trained) else 0.0,
        )

    def start(self, settings: MethodSettings) -> MethodState:
        """The state before the first step."""
        return self.first(settings) if self.first is not None else self.state()

    def advance(
        self, settings: MethodSettings, state: MethodState, batch: Sequence[Group], refills: int = 0
    ) -> MethodState:
        """The next step's state. refills: how often problems were drawn again for this one."""
        if self.updated is not None:
            state = self.updated(settings, state, batch)
        changed = {"step": state.step + 1, "refills": state.refills + refills}
        return state.model_copy(update=changed)

    def fill(
        self, settings: MethodSettings, groups: Sequence[Group], wanted: int, refills: int
    ) -> tuple[list[int], bool]:
        """(which groups to train on, at most as many as wanted; whether to draw problems again).

        refills: how often they were already. Without `refill` it is all of them.
        """
        if self.refill is None:
            return list(range(len(groups))), False
        kept = [i for i, group in enumerate(groups) if self.refill.keeps(settings, group)]
        more = len(kept) < wanted and refills < self.refill.at_most(settings)
        return kept[:wanted], more
