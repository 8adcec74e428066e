"""A method in a run: from the facts of a step's responses to what the trainer is given, and the
method's state from step to step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import attrgetter
from statistics import fmean
from types import MappingProxyType
from typing import Any

from megatron_opsft.methods.facts import Group, PromptChange, ReferenceStatistics
from megatron_opsft.methods.objective import aggregate
from megatron_opsft.methods.settings import MethodSettings, MethodState
from megatron_opsft.records import Problem, Response


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Of every response of a batch, group by group. trained: whether it takes part in the update at
    all.
    """

    rewards: tuple[float, ...]
    advantages: tuple[float, ...]
    trained: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step: the responses that are trained on, with the weight of each of their
    tokens and their advantages; factor: of the whole sum.
    """

    responses: tuple[Response, ...]
    token_weights: tuple[float, ...]
    advantages: tuple[float, ...]
    factor: float


class MethodRun:
    """The same on every rank. state: of the method, before the step that comes next.

    references: the reference model's lengths and accuracy, by problem id, for methods that ask.
    """

    def __init__(
        self,
        settings: MethodSettings,
        *,
        seed: int,
        references: Mapping[str, ReferenceStatistics] = MappingProxyType({}),
    ) -> None:
        self.settings = settings
        self.state: MethodState = settings.first_state()
        self._seed = seed
        self._references = references

    def first_draw(self, step: int) -> int:
        """Which batch of problems a step begins with, counted from 0."""
        return step - 1 + self.state.refills

    def prompt_change(self, problem_id: str, *, held_out: bool = False) -> PromptChange:
        """What a problem's prompt gets beyond the template; a held-out problem's gets a length
        alone, where the method asks for one.
        """
        target = self.settings.target_length(problem_id, self._seed, held_out=held_out)
        if held_out and target is None:
            return PromptChange()
        return self.settings.prompt(self.state, target)

    def observe(self, groups: Sequence[Group]) -> None:
        """Let the method see its monitor problems' groups."""
        self.state = self.settings.observe(self.state, groups)

    def groups(
        self, responses: Sequence[Response], problems: Sequence[Problem], limit: int
    ) -> list[Group]:
        """One group a problem. responses: of all ranks, in the order of `problems`; limit: the
        longest they could be.
        """
        return [
            Group(
                responses=list(found),
                limit=limit,
                problem_id=problems[index].id,
                target=self.settings.target_length(problems[index].id, self._seed),
                reference=self._references.get(problems[index].id),
            )
            for index, found in groupby(responses, key=attrgetter("problem_index"))
        ]

    def fill(
        self, groups: Sequence[Group], wanted: int, refills: int
    ) -> tuple[list[int], bool]:
        """(which groups to train on, at most as many as wanted; whether to draw problems again).

        refills: how often they were already. Groups are judged by rewards that are not shaped.
        """
        rewards = self.settings.rewards(groups, self.state)
        pairs = enumerate(zip(groups, rewards, strict=True))
        kept = [i for i, (group, found) in pairs if self.settings.keeps(group, found)]
        return kept[:wanted], len(
            kept
        ) < wanted and refills < self.settings.most_refills

    def weigh(self, batch: Sequence[Group]) -> Weights:
        """What each response of the batch counts.

        A response without advantage is trained on only for its divergence from the reference.
        """
        rewards = self.settings.shaped(batch, self.settings.rewards(batch, self.state))
        advantages = tuple(
            chain.from_iterable(self.settings.advantages(batch, rewards))
        )
        diverges = self.settings.objective(1.0).needs_reference
        return Weights(
            rewards=tuple(chain.from_iterable(rewards)),
            advantages=advantages,
            trained=tuple(advantage != 0 or diverges for advantage in advantages),
        )

    def updates(self, groups: Sequence[Group], weights: Weights) -> list[Update]:
        """The optimizer steps on a batch: equal shares of its problems, in order, and a factor for
        each. A share is empty where the method kept fewer problems than there are steps.
        """
        count = self.settings.num_updates
        responses = [response for group in groups for response in group.responses]
        rest = zip(responses, weights.advantages, weights.trained, strict=True)
        found = []
        for update in range(count):
            share = groups[
                len(groups) * update // count : len(groups) * (update + 1) // count
            ]
            rows = list(islice(rest, sum(len(group.responses) for group in share)))
            lengths = [response.num_tokens for response, _, _ in rows]
            accepted = [advantage != 0 for _, advantage, _ in rows]
            limit = max((group.limit for group in share), default=0)
            of_tokens, factor = aggregate(
                self.settings.aggregation, lengths, accepted, limit
            )
            weighed = zip(rows, of_tokens, strict=True)
            kept = [(r, w, a) for (r, a, is_trained), w in weighed if is_trained]
            found.append(
                Update(
                    responses=tuple(response for response, _, _ in kept),
                    token_weights=tuple(weight for _, weight, _ in kept),
                    advantages=tuple(advantage for _, _, advantage in kept),
                    factor=factor if kept else 0.0,
                )
            )
        return found

    def advance(self, groups: Sequence[Group], refills: int) -> None:
        """To the next step. refills: how often problems were drawn again for this one."""
        state = self.settings.next_state(self.state, groups)
        changed = {"step": state.step + 1, "refills": state.refills + refills}
        self.state = state.model_copy(update=changed)

    def restore(self, values: Mapping[str, Any]) -> None:
        """The state of a checkpoint, as `state.model_dump()` gave it."""
        self.state = self.settings.state_class.model_validate(values)


def describe_weights(
    groups: Sequence[Group], weights: Weights
) -> dict[str, float | int]:
    """Metrics of a step's rewards and advantages; standard deviations over the whole batch."""
    rest = iter(weights.advantages)
    return {
        "reward_mean": fmean(weights.rewards),
        "reward_std": _std(weights.rewards),
        "advantage_std": _std(weights.advantages),
        "zero_advantage_groups": sum(
            not any(list(islice(rest, len(group.responses)))) for group in groups
        ),
    }


def _std(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.sqrt(fmean((value - mean) ** 2 for value in values))
