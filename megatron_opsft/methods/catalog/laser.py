"""LASER, LASER-D and LASER-DE: a bonus for correct responses within a target length, which depends
on how hard the problem is.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.laser_targets import Targets, band_of, choose_targets
from megatron_opsft.methods.method import Method, Monitor, each_group
from megatron_opsft.methods.settings import (
    Beta,
    ClipHigh,
    GroupNormalizedSettings,
    MethodState,
    RunSize,
    check_reached,
)


class LaserRewards(GroupNormalizedSettings):
    """Keys of all three."""

    clip_high: ClipHigh = 0.28
    beta: Beta = 0.001
    bonus: float = Field(0.5, ge=0, description="Reward within the target length.")
    wrong: float = Field(-0.5, description="Reward of a wrong answer.")
    bad_format: float = Field(
        -1.0, description="Reward without an answer; a cut response has none."
    )


class LaserSettings(LaserRewards):
    """LASER."""

    name: Literal["laser"] = "laser"
    target: int = Field(2048, ge=1, description="Lt: tokens within which the bonus is paid.")

    def check(self, run: RunSize) -> None:
        """Errors: as of `PolicySettings`, and for a target that every response meets."""
        super().check(run)
        check_reached("target", self.target, run)


class LaserTargets(LaserRewards):
    """Keys of LASER-D and LASER-DE."""

    lowest_target: int = Field(
        1024, ge=1, description="Candidates for a target length: from here ..."
    )
    highest_target: int = Field(16384, ge=1, description="... to here ...")
    target_step: int = Field(1024, ge=1, description="... in steps of this many tokens.")
    rounding: Literal["ceil", "floor"] = Field(
        "ceil", description="Of the correct responses that a difficulty stands for; code: floor."
    )
    monitor_problems: int = Field(500, ge=1, description="Problems that targets are chosen on.")
    monitor_samples: int = Field(8, ge=1, description="Responses to each of them.")
    monitor_every: int = Field(20, ge=1, description="Steps between choices; one before the first.")

    def check(self, run: RunSize) -> None:
        """Errors: as of `PolicySettings`, and without a candidate that responses can miss."""
        super().check(run)
        check_reached("lowest_target", self.lowest_target, run)


class LaserDSettings(LaserTargets):
    """LASER-D."""

    name: Literal["laser_d"] = "laser_d"


class LaserDeSettings(LaserTargets):
    """LASER-DE."""

    name: Literal["laser_de"] = "laser_de"


class LaserState(MethodState):
    """targets: by difficulty; None: no candidate covers enough, so every length will do."""

    targets: Targets = Field({"easy": None, "medium": None, "hard": None})


def target_of(group: Group, state: LaserState) -> int:
    """Lt of the group's difficulty."""
    target = state.targets[band_of(group)]
    return group.limit if target is None else target


def stepped(group: Group, target: int, settings: LaserRewards) -> list[float]:
    """1, wrong or bad_format; a correct one within the target gets the bonus."""
    return [
        1.0 + settings.bonus * (r.num_tokens <= target)
        if r.correct
        else (settings.wrong if r.has_answer else settings.bad_format)
        for r in group.responses
    ]


def laser_reward(group: Group, settings: LaserSettings, state: MethodState) -> list[float]:
    """One target for all problems."""
    return stepped(group, settings.target, settings)


def laser_d_reward(group: Group, settings: LaserTargets, state: LaserState) -> list[float]:
    """The difficulty's target."""
    return stepped(group, target_of(group, state), settings)


def laser_de_reward(group: Group, settings: LaserDeSettings, state: LaserState) -> list[float]:
    """... and the bonus for wrong answers beyond it, which may explore."""
    target = target_of(group, state)
    return [
        reward + settings.bonus * (not r.correct and r.has_answer and r.num_tokens > target)
        for reward, r in zip(stepped(group, target, settings), group.responses, strict=True)
    ]


def observe(settings: LaserTargets, state: LaserState, groups: Sequence[Group]) -> LaserState:
    """New targets from the monitor problems."""
    candidates = range(settings.lowest_target, settings.highest_target + 1, settings.target_step)
    targets = choose_targets(groups, candidates, settings.rounding)
    return state.model_copy(update={"targets": targets})


MONITOR = Monitor(
    due=lambda settings, state: (state.step - 1) % settings.monitor_every == 0,
    observe=observe,
    size=lambda settings: (settings.monitor_problems, settings.monitor_samples),
)
PAPER = "LASER, arXiv 2505.15612"

LASER = Method(
    formula="r = R + 0.5 [correct and n <= Lt], R = 1, -0.5 or -1",
    paper=PAPER,
    settings=LaserSettings,
    reward=each_group(laser_reward),
)
LASER_D = Method(
    formula="laser with Lt by difficulty, chosen anew every 20 steps",
    paper=PAPER,
    settings=LaserDSettings,
    reward=each_group(laser_d_reward),
    state=LaserState,
    monitor=MONITOR,
    needs=("monitor problems",),
)
LASER_DE = Method(
    formula="laser_d + 0.5 [wrong and n > Lt]",
    paper=PAPER,
    settings=LaserDeSettings,
    reward=each_group(laser_de_reward),
    state=LaserState,
    monitor=MONITOR,
    needs=("monitor problems",),
)
