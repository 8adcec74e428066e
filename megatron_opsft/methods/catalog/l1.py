"""L1: the prompt asks for a length, exactly or at most, and the reward holds the model to it."""

import random
from typing import Literal

from pydantic import Field

from megatron_opsft.errors import UserError
from megatron_opsft.methods.facts import Group, LengthTarget, PromptChange
from megatron_opsft.methods.method import Method, each_group
from megatron_opsft.methods.settings import (
    Beta,
    DualClip,
    GroupNormalizedSettings,
    MethodState,
    RunSize,
)


class L1Settings(GroupNormalizedSettings):
    """Keys of L1-Exact and L1-Max."""

    beta: Beta = 0.001
    dual_clip: DualClip = 3.0
    lowest_target: int = Field(
        100, ge=1, description="Each problem's target length is drawn once, from here ..."
    )
    highest_target: int = Field(3500, ge=1, description="... to here, in tokens.")
    alpha: float = Field(0.0003, gt=0, description="Reward lost with each token off the target.")
    prompt_target: bool = Field(True, description="The prompt ends with the target length.")
    eval_target: int | None = Field(
        None,
        ge=1,
        description="Target length that prompts of the evaluation end with; null: drawn as in "
        "training.",
    )

    def check(self, run: RunSize) -> None:
        """Errors: as of `PolicySettings`, and for targets that no response can have."""
        super().check(run)
        if not self.lowest_target <= self.highest_target <= run.max_response_tokens:
            raise UserError(
                f"method.lowest_target={self.lowest_target}, method.highest_target="
                f"{self.highest_target} and rollout.max_response_tokens={run.max_response_tokens} "
                "must ascend in this order; change the first that is too high"
            )


class L1ExactSettings(L1Settings):
    """L1-Exact."""

    name: Literal["l1_exact"] = "l1_exact"


class L1MaxSettings(L1Settings):
    """L1-Max."""

    name: Literal["l1_max"] = "l1_max"
    delta: float = Field(0.5, ge=0, le=1, description="Reward of a correct one on the target.")
    exact_share: float = Field(
        0.5, ge=0, le=1, description="Share of the problems that keep L1-Exact's prompt and reward."
    )
    code_reward: bool = Field(
        False, description="The published code's slope: alpha / 2, and 1/2 on the target."
    )


def draw_target(settings: L1Settings, problem_id: str, seed: int) -> LengthTarget:
    """The problem's target, the same whenever it is drawn."""
    draw = random.Random(f"l1:{seed}:{problem_id}")
    num_tokens = draw.randint(settings.lowest_target, settings.highest_target)
    is_max = isinstance(settings, L1MaxSettings) and draw.random() >= settings.exact_share
    return LengthTarget(num_tokens=num_tokens, kind="max" if is_max else "exact")


def evaluation_target(settings: L1Settings, problem_id: str, seed: int) -> LengthTarget:
    """The one that is given, of L1-Max at most, or as in training."""
    if settings.eval_target is None:
        return draw_target(settings, problem_id, seed)
    kind: Literal["exact", "max"] = "max" if isinstance(settings, L1MaxSettings) else "exact"
    return LengthTarget(num_tokens=settings.eval_target, kind=kind)


def ask(settings: L1Settings, state: MethodState, target: LengthTarget | None) -> PromptChange:
    """The end of the prompt, in the words that the authors' models know."""
    if target is None or not settings.prompt_target:
        return PromptChange()
    kind = "maximum " if target.kind == "max" else ""
    return PromptChange(suffix=f" Think for {kind}{target.num_tokens} tokens.")


def l1_reward(group: Group, settings: L1Settings, state: MethodState) -> list[float]:
    """c - alpha |Lt - n|; at most: c clip(alpha (Lt - n) + delta, 0, 1)."""
    assert group.target is not None
    off = [group.target.num_tokens - length for length in group.lengths]
    correct = [float(response.correct) for response in group.responses]
    if group.target.kind == "exact":
        return [c - settings.alpha * abs(d) for c, d in zip(correct, off, strict=True)]
    assert isinstance(settings, L1MaxSettings)
    slope, delta = settings.alpha, settings.delta
    if settings.code_reward:
        slope, delta = settings.alpha / 2, 0.5
    return [c * min(max(slope * d + delta, 0.0), 1.0) for c, d in zip(correct, off, strict=True)]


L1_EXACT = Method(
    formula="r = 1[correct] - alpha |Lt - n|, Lt in the prompt",
    paper="L1, arXiv 2503.04697",
    settings=L1ExactSettings,
    reward=each_group(l1_reward),
    target=draw_target,
    evaluation_target=evaluation_target,
    prompt=ask,
)
L1_MAX = Method(
    formula="r = 1[correct] clip(alpha (Lt - n) + delta, 0, 1), Lt in the prompt",
    paper="L1, arXiv 2503.04697",
    settings=L1MaxSettings,
    reward=each_group(l1_reward),
    target=draw_target,
    evaluation_target=evaluation_target,
    prompt=ask,
    needs=("a model from l1_exact to start with",),
)
