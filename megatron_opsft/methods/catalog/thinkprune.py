"""ThinkPrune: truncation at a limit that shrinks from stage to stage."""

from itertools import accumulate
from typing import Annotated, Literal

from megatron_opsft.errors import UserError
from megatron_opsft.methods.facts import Group, LengthTarget, PromptChange
from megatron_opsft.methods.policy import Beta, GroupNormalizedSettings
from megatron_opsft.methods.settings import MethodState, RunSize
from megatron_opsft.section import CommaSeparated


class ThinkPrune(GroupNormalizedSettings):
    """ThinkPrune's settings. Empty `limits`: one stage, at rollout.max_response_tokens."""

    formula = "r = 1[correct and n <= L], L shrinks in stages"
    paper = "ThinkPrune, arXiv 2504.01296"
    name: Literal["thinkprune"] = "thinkprune"
    beta: Beta = 0.001
    limits: Annotated[tuple[int, ...], CommaSeparated] = ()
    """Length limit of each stage, in tokens; none: the run's, in one stage."""
    stage_steps: Annotated[tuple[int, ...], CommaSeparated] = ()
    """Steps of each stage but the last, which lasts until the run ends."""
    announce_limit: bool = False
    """A system message states the limit, as the authors' does."""

    def check(self, run: RunSize) -> None:
        """Check also that stages and steps fit each other."""
        super().check(run)
        num_changes = max(len(self.limits) - 1, 0)
        if len(self.stage_steps) != num_changes or min(self.stage_steps, default=1) < 1:
            raise UserError(
                f"method.limits={list(self.limits)} has {len(self.limits)} stages: give "
                "method.stage_steps the steps of each but the last, not "
                f"{list(self.stage_steps)}"
            )
        if (
            self.limits
            and not 1 <= min(self.limits) <= max(self.limits) <= run.max_response_tokens
        ):
            raise UserError(
                f"method.limits={list(self.limits)} must lie between 1 and "
                f"rollout.max_response_tokens={run.max_response_tokens}; raise that one"
            )

    @property
    def has_length(self) -> bool:
        return bool(self.limits) or super().has_length

    def group_rewards(self, group: Group, state: MethodState) -> list[float]:
        """1 if correct, finished, and no longer than the stage's limit."""
        return group.within(self.stage_limit(state) or group.limit)

    def limit(self, state: MethodState) -> int | None:
        """The limit of the state's stage; the run's if stages limit the thinking alone."""
        return self.stage_limit(state) if self.length_of == "response" else None

    def stage_limit(self, state: MethodState) -> int | None:
        """The limit of the state's stage; None without `limits`."""
        if not self.limits:
            return None
        stages_done = sum(state.step > last for last in accumulate(self.stage_steps))
        return self.limits[stages_done]

    def starts_stage(self, state: MethodState) -> bool:
        """True if a stage, but not the first one, begins with the state's step."""
        return state.step - 1 in accumulate(self.stage_steps)

    @property
    def renews_frozen_model(self) -> bool:
        """True if there are several stages."""
        return bool(self.stage_steps)

    def prompt(self, state: MethodState, target: LengthTarget | None) -> PromptChange:
        """The system message that states the stage's limit, worded after the authors' own; nothing
        without `announce_limit` or limits.
        """
        limit = self.stage_limit(state)
        if not self.announce_limit or limit is None:
            return PromptChange()
        what_for = "in all" if self.length_of == "response" else "to think"
        return PromptChange(
            system="Think first, between <think> and </think>, then answer. Use no more than "
            f"{limit} tokens {what_for}."
        )
