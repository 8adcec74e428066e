"""L1: the prompt asks for a length, exactly or at most, and the reward falls with the distance."""

import random
from typing import Literal

from pydantic import Field, PositiveFloat

from megatron_opsft.errors import UserError
from megatron_opsft.methods.facts import Group, LengthKind, LengthTarget, PromptChange
from megatron_opsft.methods.policy import Beta, DualClip, GroupNormalizedSettings
from megatron_opsft.methods.settings import RunSize, State


class L1Settings(GroupNormalizedSettings):
    """Settings of L1-Exact and L1-Max."""

    paper = "L1, arXiv 2503.04697"
    measures_length = True
    per_token = {"lowest_target": 1, "highest_target": 1, "alpha": -1}
    fits_from = 3500
    beta: Beta = 0.001
    dual_clip: DualClip = 3.0
    lowest_target: int = Field(100, ge=1)
    """Each problem's target length is drawn once, from here ..."""
    highest_target: int = Field(3500, ge=1)
    """... to here, in tokens."""
    alpha: PositiveFloat = 0.0003
    """Reward lost with each token off the target."""
    prompt_target: bool = True
    """The prompt ends with the target length."""
    eval_target: int | None = Field(None, ge=1)
    """Target length that prompts of the evaluation end with; null: drawn as in training."""

    def check(self, run: RunSize) -> None:
        """Check also that a response can be as long as every target."""
        super().check(run)
        if not self.lowest_target <= self.highest_target <= run.max_response_tokens:
            raise UserError(
                f"method.lowest_target={self.lowest_target}, method.highest_target="
                f"{self.highest_target} and rollout.max_response_tokens={run.max_response_tokens} "
                "must ascend in this order; change the first that is too high"
            )

    def kind_at(self, number: float) -> LengthKind:
        """Whether a target is exact or a maximum. number: between 0 and 1; drawn for each problem,
        and always 1 for `eval_target`.
        """
        return "exact"

    def target_length(
        self, problem_id: str, seed: int, *, held_out: bool = False
    ) -> LengthTarget:
        """The problem's target, the same whenever it is drawn.

        A held-out problem has `eval_target`, if it is set.
        """
        if held_out and self.eval_target is not None:
            return LengthTarget(num_tokens=self.eval_target, kind=self.kind_at(1.0))
        draw = random.Random(f"l1:{seed}:{problem_id}")
        num_tokens = draw.randint(self.lowest_target, self.highest_target)
        return LengthTarget(num_tokens=num_tokens, kind=self.kind_at(draw.random()))

    def prompt(self, state: State, target: LengthTarget | None) -> PromptChange:
        """End the prompt with the target, in the words that the authors' models know."""
        if target is None or not self.prompt_target:
            return PromptChange()
        kind = "maximum " if target.kind == "max" else ""
        return PromptChange(suffix=f" Think for {kind}{target.num_tokens} tokens.")

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """c - alpha |Lt - n|."""
        assert group.target is not None
        target = group.target.num_tokens
        pairs = zip(group.verdicts, group.lengths, strict=True)
        return [
            verdict - self.alpha * abs(target - length) for verdict, length in pairs
        ]


class L1Exact(L1Settings):
    """L1-Exact's settings."""

    formula = "r = 1[correct] - alpha |Lt - n|, Lt in the prompt"
    name: Literal["l1_exact"] = "l1_exact"


class L1Max(L1Settings):
    """L1-Max's settings."""

    formula = "r = 1[correct] clip(alpha (Lt - n) + delta, 0, 1), Lt in the prompt"
    needs = ("a model from l1_exact to start with",)
    name: Literal["l1_max"] = "l1_max"
    delta: float = Field(0.5, ge=0, le=1)
    """Reward of a correct one on the target."""
    exact_share: float = Field(0.5, ge=0, le=1)
    """Share of the problems that keep L1-Exact's prompt and reward."""

    def kind_at(self, number: float) -> LengthKind:
        return "max" if number >= self.exact_share else "exact"

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """1[correct] clip(alpha (target - length) + delta, 0, 1) for a maximum. For an exact
        target: L1-Exact's reward.
        """
        assert group.target is not None
        if group.target.kind == "exact":
            return super().group_rewards(group, state)
        rewards = []
        for verdict, length in zip(group.verdicts, group.lengths, strict=True):
            below = group.target.num_tokens - length
            share = min(max(self.alpha * below + self.delta, 0.0), 1.0)
            rewards.append(verdict * share)
        return rewards
