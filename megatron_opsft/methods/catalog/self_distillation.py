"""Self-distillation: draws the model to what it says itself when told to be concise."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.objective import Distillation, Objective
from megatron_opsft.methods.settings import MethodSettings, State
from megatron_opsft.section import TemplateName


class SelfDistillation(MethodSettings):
    """OPSDC's settings.

    Learning from correct responses alone, and the likelihood beside the divergence, are this
    project's. With `likelihood` 1 it is on-policy SFT with a divergence from the teacher.
    """

    formula = "KL(policy || teacher), every token, whole vocabulary; A = 1[correct and n <= L]"
    paper = "On-Policy Self-Distillation for Concise Reasoning, arXiv 2603.05433"
    needs = ("a frozen copy of the model, the teacher",)
    name: Literal["self_distillation"] = "self_distillation"
    teacher_template: TemplateName = "concise"
    """The teacher's prompt, in place of data.template's: one of its names, or a .jinja file that
    names `problem` alone.
    """
    responses: Literal["all", "correct"] = "correct"
    """Which are learned from: the accepted ones, or all, as the authors do."""
    refresh_every: NonNegativeInt = 50
    """Steps after which the teacher's weights are the model's again; 0: never."""
    direction: Literal["reverse", "forward"] = "reverse"
    """KL of the policy to the teacher, or of the teacher to the policy."""
    beta: PositiveFloat = 1.0
    """Weight of the divergence from the teacher."""
    likelihood: NonNegativeFloat = 0.0
    """Weight of on-policy SFT's -log p of the same responses, beside it."""

    @property
    def teacher(self) -> str:
        return self.teacher_template

    @property
    def learns_from_rejected(self) -> bool:
        return self.responses == "all"

    def objective(self, sampling_temperature: float) -> Objective:
        """The divergence from the teacher, at temperature 1 whatever the sampling's."""
        surrogate = Distillation(
            beta=self.beta,
            likelihood=self.likelihood,
            forward=self.direction == "forward",
        )
        return Objective(surrogate=surrogate)

    def group_advantages(self, group: Group, rewards: list[float]) -> list[float]:
        """1 for every response that the model learns from."""
        if self.responses == "all":
            return [1.0] * len(rewards)
        return rewards

    @property
    def renews_frozen_model(self) -> bool:
        """True if the teacher is ever refreshed."""
        return self.refresh_every > 0

    def refreshes_teacher(self, state: State) -> bool:
        """True after every `refresh_every` steps."""
        steps_done = state.step - 1
        if self.refresh_every == 0 or steps_done == 0:
            return False
        return bool(steps_done % self.refresh_every == 0)
