"""LASER, LASER-D and LASER-DE: a bonus for correct responses within a target length, which depends
on how hard the problem is, and how LASER-D chooses it from responses to monitor problems.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.settings import (
    Beta,
    ClipHigh,
    GroupNormalizedSettings,
    MethodState,
)

Band = Literal["easy", "medium", "hard"]
Targets = dict[Band, int | None]


def band_of(group: Group) -> Band:
    """Easy from two thirds correct on, medium from one third on."""
    thirds = 3 * group.num_correct
    if thirds >= 2 * len(group.responses):
        return "easy"
    return "medium" if thirds >= len(group.responses) else "hard"


def choose_targets(
    groups: Sequence[Group],
    candidates: Iterable[int],
    rounding: Literal["ceil", "floor"],
) -> Targets:
    """For each difficulty the smallest candidate that keeps at least one correct response a
    problem: the share of its responses, right or wrong, that are no longer than the candidate,
    times the correct ones that the difficulty stands for, is at least 1. None where none does.
    """
    num_samples, up = len(groups[0].responses), 2 if rounding == "ceil" else 0
    # The fewest correct responses at each difficulty: of 8 they are 6, 3 and 1.
    needed: dict[Band, int] = {
        "easy": max((2 * num_samples + up) // 3, 1),
        "medium": max((num_samples + up) // 3, 1),
        "hard": 1,
    }
    lengths: dict[Band, list[int]] = {band: [] for band in needed}
    for group in groups:
        lengths[band_of(group)] += group.lengths
    ascending = sorted(candidates)

    def covers(band: Band, candidate: int) -> bool:
        found = lengths[band]
        within = sum(length <= candidate for length in found)
        return bool(found) and within * needed[band] >= len(found)

    return {
        band: next((length for length in ascending if covers(band, length)), None)
        for band in needed
    }


class LaserState(MethodState):
    """targets: by difficulty; None: no candidate covers enough, so every length will do."""

    targets: Targets = Field({"easy": None, "medium": None, "hard": None})


class LaserRewards(GroupNormalizedSettings):
    """What all three share."""

    paper = "LASER, arXiv 2505.15612"
    clip_high: ClipHigh = 0.28
    beta: Beta = 0.001
    bonus: float = Field(0.5, ge=0)
    """Reward within the target length."""
    wrong: float = -0.5
    """Reward of a wrong answer."""
    bad_format: float = -1.0
    """Reward without an answer; a cut response has none."""

    def stepped(self, group: Group, target: int) -> list[float]:
        """1, wrong or bad_format; a correct one within the target gets the bonus."""
        return [
            1.0 + self.bonus * (r.num_tokens <= target)
            if r.correct
            else (self.wrong if r.has_answer else self.bad_format)
            for r in group.responses
        ]


class Laser(LaserRewards):
    """LASER."""

    formula = "r = R + 0.5 [correct and n <= Lt], R = 1, -0.5 or -1"
    per_token = {"target": 1}
    fits_from = 2049
    missable = "target"
    name: Literal["laser"] = "laser"
    target: int = Field(2048, ge=1)
    """Lt: tokens within which the bonus is paid."""

    def group_rewards(self, group: Group, state: MethodState) -> list[float]:
        """One target for all problems."""
        return self.stepped(group, self.target)


class LaserTargets(LaserRewards):
    """What LASER-D and LASER-DE share: targets by difficulty, from monitor problems."""

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
        is_due = (state.step - 1) % self.monitor_every == 0
        return (self.monitor_problems, self.monitor_samples) if is_due else None

    def observe(self, state: LaserState, groups: Sequence[Group]) -> LaserState:
        """New targets from the monitor problems."""
        candidates = range(
            self.lowest_target, self.highest_target + 1, self.target_step
        )
        targets = choose_targets(groups, candidates, self.rounding)
        return state.model_copy(update={"targets": targets})

    def group_rewards(self, group: Group, state: LaserState) -> list[float]:
        """The difficulty's target."""
        return self.stepped(group, target_of(group, state))


class LaserD(LaserTargets):
    """LASER-D."""

    formula = "laser with Lt by difficulty, chosen anew every 20 steps"
    name: Literal["laser_d"] = "laser_d"


class LaserDe(LaserTargets):
    """LASER-DE."""

    formula = "laser_d + 0.5 [wrong and n > Lt]"
    name: Literal["laser_de"] = "laser_de"

    def group_rewards(self, group: Group, state: LaserState) -> list[float]:
        """... and the bonus for wrong answers beyond it, which may explore."""
        target = target_of(group, state)
        return [
            reward
            + self.bonus * (not r.correct and r.has_answer and r.num_tokens > target)
            for reward, r in zip(
                self.stepped(group, target), group.responses, strict=True
            )
        ]


def target_of(group: Group, state: LaserState) -> int:
    """Lt of the group's difficulty."""
    target = state.targets[band_of(group)]
    return group.limit if target is None else target
