"""LASER, LASER-D and LASER-DE: a bonus for correct responses within a target length.

LASER-D and LASER-DE choose a target for each difficulty, from responses to monitor problems.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal

from pydantic import Field, NonNegativeFloat

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.policy import Beta, ClipHigh, GroupNormalizedSettings
from megatron_opsft.methods.settings import MethodState, State

Band = Literal["easy", "medium", "hard"]
Targets = dict[Band, int | None]


def band_of(group: Group) -> Band:
    """The difficulty of a problem: easy from two thirds correct on, medium from one third on."""
    # In whole numbers, which are not rounded.
    if 3 * group.num_correct >= 2 * len(group.responses):
        return "easy"
    if 3 * group.num_correct >= len(group.responses):
        return "medium"
    return "hard"


def choose_targets(
    groups: Sequence[Group],
    candidates: Iterable[int],
    rounding: Literal["ceil", "floor"],
) -> Targets:
    """Choose for each difficulty the smallest candidate that leaves one correct response a problem.

    A candidate does so if (share of the responses to such problems, right or wrong, that are no
    longer than it) x (fewest correct responses at this difficulty) is at least 1. None if no
    candidate does. rounding: how the fewest correct responses are rounded.
    """
    num_samples = len(groups[0].responses)
    added = 2 if rounding == "ceil" else 0  # (n + 2) // 3 is a third of n, rounded up
    # Of 8 samples they are 6, 3 and 1.
    fewest_correct: dict[Band, int] = {
        "easy": max((2 * num_samples + added) // 3, 1),
        "medium": max((num_samples + added) // 3, 1),
        "hard": 1,
    }
    ascending = sorted(candidates)
    targets: Targets = dict.fromkeys(fewest_correct)
    for band, fewest in fewest_correct.items():
        of_band = [group.lengths for group in groups if band_of(group) == band]
        lengths = sorted(chain.from_iterable(of_band))
        for candidate in ascending:
            num_within = bisect_right(lengths, candidate)
            if num_within and num_within * fewest >= len(lengths):
                targets[band] = candidate
                break
    return targets


class LaserState(MethodState):
    """The target lengths of the next step."""

    targets: Targets = Field({"easy": None, "medium": None, "hard": None})
    """By difficulty. None: no candidate was long enough, so every length is within the target."""


class LaserRewards(GroupNormalizedSettings):
    """Settings and rewards of all three."""

    paper = "LASER, arXiv 2505.15612"
    measures_length = True
    clip_high: ClipHigh = 0.28
    beta: Beta = 0.001
    bonus: NonNegativeFloat = 0.5
    """Reward within the target length."""
    wrong: float = -0.5
    """Reward of a wrong answer."""
    bad_format: float = -1.0
    """Reward without an answer; a cut response has none."""

    def target_of(self, group: Group, state: State) -> int:
        """Lt for the group's problem: tokens within which the bonus is paid."""
        raise NotImplementedError

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """1, `wrong` or `bad_format`; a correct response within the target gets the bonus."""
        target = self.target_of(group, state)
        rewards = []
        for response, length in zip(group.responses, group.lengths, strict=True):
            if not response.has_answer:
                rewards.append(self.bad_format)
            elif not response.correct:
                rewards.append(self.wrong)
            elif length <= target:
                rewards.append(1.0 + self.bonus)
            else:
                rewards.append(1.0)
        return rewards


class Laser(LaserRewards):
    """LASER's settings."""

    formula = "r = R + 0.5 [correct and n <= Lt], R = 1, -0.5 or -1"
    per_token = {"target": 1}
    fits_from = 2049
    missable = "target"
    name: Literal["laser"] = "laser"
    target: int = Field(2048, ge=1)
    """Lt: tokens within which the bonus is paid."""

    def target_of(self, group: Group, state: State) -> int:
        return self.target


class LaserTargets(LaserRewards):
    """Settings of LASER-D and LASER-DE: targets by difficulty, from monitor problems."""

    needs = ("monitor problems",)
    state_class = LaserState
    per_token = {"lowest_target": 1, "highest_target": 1, "target_step": 1}
    fits_from = 1025
    missable = "lowest_target"
    lowest_target: int = Field(1024, ge=1)
    """Candidates for a target length: from here ..."""
    highest_target: int = Field(16384, ge=1)
    """... to here ..."""
    target_step: int = Field(1024, ge=1)
    """... in steps of this many tokens."""
    rounding: Literal["ceil", "floor"] = "ceil"
    """Of the correct responses that a difficulty stands for; code: floor."""
    monitor_problems: int = Field(500, ge=1)
    """Problems that targets are chosen on."""
    monitor_samples: int = Field(8, ge=1)
    """Responses to each of them."""
    monitor_every: int = Field(20, ge=1)
    """Steps between choices; one before the first."""

    def monitor_size(self, state: LaserState) -> tuple[int, int] | None:
        if (state.step - 1) % self.monitor_every:
            return None
        return self.monitor_problems, self.monitor_samples

    def observe(self, state: LaserState, groups: Sequence[Group]) -> LaserState:
        """Choose new targets on the monitor problems."""
        candidates = range(
            self.lowest_target, self.highest_target + 1, self.target_step
        )
        targets = choose_targets(groups, candidates, self.rounding)
        return state.model_copy(update={"targets": targets})

    def target_of(self, group: Group, state: LaserState) -> int:
        """The target of the problem's difficulty; the limit, if there is none."""
        target = state.targets[band_of(group)]
        return group.limit if target is None else target


class LaserD(LaserTargets):
    """LASER-D's settings."""

    formula = "laser with Lt by difficulty, chosen anew every 20 steps"
    name: Literal["laser_d"] = "laser_d"


class LaserDe(LaserTargets):
    """LASER-DE's settings."""

    formula = "laser_d + 0.5 [wrong and n > Lt]"
    name: Literal["laser_de"] = "laser_de"

    def group_rewards(self, group: Group, state: LaserState) -> list[float]:
        """LASER-D's, and the bonus for wrong answers beyond the target, which may explore."""
        target = self.target_of(group, state)
        rewards = super().group_rewards(group, state)
        for i, length in enumerate(group.lengths):
            response = group.responses[i]
            is_wrong = response.has_answer and not response.correct
            if is_wrong and length > target:
                rewards[i] += self.bonus
        return rewards
