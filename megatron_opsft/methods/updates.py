"""A method in a run: what it makes of a step's responses, and its state from step to step."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, compress, groupby
from operator import attrgetter
from statistics import fmean
from types import MappingProxyType
from typing import Any

from megatron_opsft.methods.facts import Group, PromptChange, ReferenceStatistics
from megatron_opsft.methods.objective import aggregate
from megatron_opsft.methods.settings import MethodSettings, MethodState
from megatron_opsft.records import Problem, Response, record


@record
class Credit:
    """What a method makes of one response."""

    response: Response
    reward: float
    advantage: float
    is_trained: bool
    """True if the response takes part in the update at all."""


Credits = Sequence[Sequence[Credit]]
"""The credits of a batch, group by group."""


@record
class Update:
    """One optimizer step: the responses that are trained on."""

    responses: tuple[Response, ...]
    token_weights: tuple[float, ...]
    """Weight of every token of each response."""
    advantages: tuple[float, ...]
    """Advantage of each response."""
    factor: float
    """Factor of the whole sum."""


class MethodRun:
    """A method in a run: its settings and its state before the next step, the same on every rank.

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

    @property
    def limit(self) -> int | None:
        """Most tokens of a response in the next step; None: the run's limit."""
        return self.settings.limit(self.state)

    @property
    def starts_stage(self) -> bool:
        """True if optimizer moments and reference model are reset before the next step."""
        return self.settings.starts_stage(self.state)

    @property
    def refreshes_teacher(self) -> bool:
        """True if the model is copied into the teacher before the next step."""
        return self.settings.refreshes_teacher(self.state)

    @property
    def monitor_size(self) -> tuple[int, int] | None:
        """How many extra problems to sample before the next step, and responses to each."""
        return self.settings.monitor_size(self.state)

    def first_draw(self, step: int) -> int:
        """Return the number of the batch of problems that a step begins with, from 0."""
        return step - 1 + self.state.refills

    def prompt_change(self, problem_id: str, *, held_out: bool = False) -> PromptChange:
        """Return what the method adds to a problem's prompt.

        A held-out problem's prompt gets at most a length, if the method asks for one.
        """
        target = self.settings.target_length(problem_id, self._seed, held_out=held_out)
        if held_out and target is None:
            return PromptChange()
        return self.settings.prompt(self.state, target)

    def observe(self, groups: Sequence[Group]) -> None:
        """Show the method the groups of its monitor problems."""
        self.state = self.settings.observe(self.state, groups)

    def groups(
        self, responses: Sequence[Response], problems: Sequence[Problem], limit: int
    ) -> list[Group]:
        """Return one group for each problem that has responses.

        responses: those of all ranks, in the order of `problems`. limit: most tokens that one could
        have.
        """
        groups = []
        for index, of_problem in groupby(responses, key=attrgetter("problem_index")):
            problem_id = problems[index].id
            groups.append(
                Group(
                    responses=list(of_problem),
                    limit=limit,
                    problem_id=problem_id,
                    target=self.settings.target_length(problem_id, self._seed),
                    reference=self._references.get(problem_id),
                    length_of=self.settings.length_of,
                )
            )
        return groups

    def fill(
        self, groups: Sequence[Group], wanted: int, refills: int
    ) -> tuple[list[int], bool]:
        """Choose the groups to train on, at most `wanted`: their indices, and True if problems are
        to be drawn again.

        refills: how often problems were already drawn again.
        """
        rewards = self.settings.rewards(groups, self.state)
        is_kept = map(self.settings.keeps, groups, rewards)
        kept_indices = list(compress(range(len(groups)), is_kept))
        has_too_few = len(kept_indices) < wanted
        draws_again = has_too_few and refills < self.settings.most_refills
        return kept_indices[:wanted], draws_again

    def credit(self, batch: Sequence[Group]) -> list[list[Credit]]:
        """Give every response of the batch its reward and advantage.

        A response with advantage 0 is trained on only for its divergence from the reference model.
        """
        plain_rewards = self.settings.rewards(batch, self.state)
        rewards = list(map(self.settings.shaped, batch, plain_rewards))
        advantages = self.settings.advantages(batch, rewards)
        # At any temperature: it does not decide whether there is a divergence.
        diverges = self.settings.objective(1.0).needs_reference
        credits = []
        for group, group_rewards, group_advantages in zip(
            batch, rewards, advantages, strict=True
        ):
            group_credits = []
            for response, reward, advantage in zip(
                group.responses, group_rewards, group_advantages, strict=True
            ):
                group_credits.append(
                    Credit(
                        response=response,
                        reward=reward,
                        advantage=advantage,
                        is_trained=advantage != 0 or diverges,
                    )
                )
            credits.append(group_credits)
        return credits

    def updates(self, groups: Sequence[Group], credits: Credits) -> list[Update]:
        """Return the optimizer steps on a batch: equal shares of its problems, in order.

        A share is empty if the method kept fewer problems than there are steps.
        """
        num_updates = self.settings.num_updates
        updates = []
        for number in range(num_updates):
            start = len(groups) * number // num_updates
            end = len(groups) * (number + 1) // num_updates
            share = list(chain.from_iterable(credits[start:end]))
            # All responses of the share count here, also those that are not trained on.
            token_weights, factor = aggregate(
                self.settings.aggregation,
                [credit.response.num_tokens for credit in share],
                [credit.advantage != 0 for credit in share],
                max((group.limit for group in groups[start:end]), default=0),
            )
            is_trained = [credit.is_trained for credit in share]
            trained = list(compress(share, is_trained))
            updates.append(
                Update(
                    responses=tuple(credit.response for credit in trained),
                    token_weights=tuple(compress(token_weights, is_trained)),
                    advantages=tuple(credit.advantage for credit in trained),
                    factor=factor if trained else 0.0,
                )
            )
        return updates

    def advance(self, groups: Sequence[Group], refills: int) -> None:
        """Move to the next step. refills: how often problems were drawn again for this one."""
        state = self.settings.next_state(self.state, groups)
        changed = {"step": state.step + 1, "refills": state.refills + refills}
        self.state = state.model_copy(update=changed)

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint. values: from `state.model_dump()`."""
        self.state = self.settings.state_class.model_validate(values)


def describe_credits(credits: Credits) -> dict[str, float | int]:
    """Metrics of a step's rewards and advantages; standard deviations over the whole batch."""
    of_batch = list(chain.from_iterable(credits))
    rewards = [credit.reward for credit in of_batch]
    groups_without_advantage = [
        group for group in credits if not any(credit.advantage for credit in group)
    ]
    return {
        "reward_mean": fmean(rewards),
        "reward_std": _std(rewards),
        "advantage_std": _std([credit.advantage for credit in of_batch]),
        "zero_advantage_groups": len(groups_without_advantage),
    }


def _std(values: Sequence[float]) -> float:
    """Return the standard deviation, divided by the count."""
    mean = fmean(values)
    return math.sqrt(fmean((value - mean) ** 2 for value in values))
