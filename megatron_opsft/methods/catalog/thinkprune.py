"""ThinkPrune: truncation at a limit that shrinks from stage to stage."""

from itertools import accumulate
from typing import Annotated, Literal

from pydantic import Field

from megatron_opsft.config_section import CommaSeparated
from megatron_opsft.errors import UserError
from megatron_opsft.methods.facts import LengthTarget, PromptChange
from megatron_opsft.methods.method import Method, each_group
from megatron_opsft.methods.rewards import truncation
from megatron_opsft.methods.settings import Beta, GroupNormalizedSettings, MethodState, RunSize


class ThinkPruneSettings(GroupNormalizedSettings):
    """Without `limits` there is one stage, at rollout.max_response_tokens."""

    name: Literal["thinkprune"] = "thinkprune"
    beta: Beta = 0.001
    limits: Annotated[tuple[int, ...], CommaSeparated] = Field(
        (), description="Length limit of each stage, in tokens; none: the run's, in one stage."
    )
    stage_steps: Annotated[tuple[int, ...], CommaSeparated] = Field(
        (), description="Steps of each stage but the last, which lasts until the run ends."
    )
    announce_limit: bool = Field(
        False, description="A system message states the limit, as the authors' does."
    )

    def check(self, run: RunSize) -> None:
        """Errors: as of `PolicySettings`, and where stages and steps do not fit each other."""
        super().check(run)
        if (
            len(self.stage_steps) != max(len(self.limits) - 1, 0)
            or min(self.stage_steps, default=1) < 1
        ):
            raise UserError(
                f"method.limits={list(self.limits)} has {len(self.limits)} stages: give "
                "method.stage_steps the steps of each but the last, not "
                f"{list(self.stage_steps)}"
            )
        if self.limits and not 1 <= min(self.limits) <= max(self.limits) <= run.max_response_tokens:
            raise UserError(
                f"method.limits={list(self.limits)} must lie between 1 and "
                f"rollout.max_response_tokens={run.max_response_tokens}; raise that one"
            )


def limit_of_stage(settings: ThinkPruneSettings, state: MethodState) -> int | None:
    """The limit in the state's step."""
    ended = sum(state.step > steps for steps in accumulate(settings.stage_steps))
    return settings.limits[ended] if settings.limits else None


def starts_stage(settings: ThinkPruneSettings, state: MethodState) -> bool:
    """Whether a stage but the first begins with the state's step."""
    return state.step - 1 in accumulate(settings.stage_steps)


def announced(
    settings: ThinkPruneSettings, state: MethodState, target: LengthTarget | None
) -> PromptChange:
    """The system message; the authors' has the same content."""
    limit = limit_of_stage(settings, state)
    if not settings.announce_limit or limit is None:
        return PromptChange()
    return PromptChange(
        system="Think first, between <think> and </think>, then answer. Use no more than "
        f"{limit} tokens in all."
    )


THINKPRUNE = Method(
    formula="r = 1[correct and n <= L], L shrinks in stages",
    paper="ThinkPrune, arXiv 2504.01296",
    settings=ThinkPruneSettings,
    reward=each_group(truncation),
    limit=limit_of_stage,
    starts_stage=starts_stage,
    prompt=announced,
)
