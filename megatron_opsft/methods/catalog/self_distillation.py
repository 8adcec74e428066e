"""Self-distillation: the model is drawn to what it would say itself, were it told to be concise."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.advantages import Values
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.objective import Distillation, Objective
from megatron_opsft.methods.settings import MethodSettings, State
from megatron_opsft.section import TemplateName


class SelfDistillation(MethodSettings):
    """OPSDC; learning from correct responses alone, and likelihood beside it, are this project's.
    With `likelihood` 1 it is on-policy SFT with a divergence from the teacher.
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
    refresh_every: int = Field(50, ge=0)
    """Steps after which the teacher's weights are the model's again; 0: never."""
    direction: Literal["reverse", "forward"] = "reverse"
    """KL of the policy to the teacher, or of the teacher to the policy."""
    beta: float = Field(1.0, gt=0)
    """Weight of the divergence from the teacher."""
    likelihood: float = Field(0.0, ge=0)
    """Weight of on-policy SFT's -log p of the same responses, beside it."""

    @property
    def learns_from_rejected(self) -> bool:
        return self.responses == "all"

    def objective(self, sampling_temperature: float) -> Objective:
        surrogate = Distillation(
            beta=self.beta,
            likelihood=self.likelihood,
            forward=self.direction == "forward",
        )
        return Objective(surrogate=surrogate)

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        """1 for every response that is learned from."""
        if self.responses == "all":
            return [[1.0] * len(group) for group in rewards]
        return rewards

    @property
    def renews_frozen_model(self) -> bool:
        """Where the teacher is refreshed."""
        return self.refresh_every > 0

    def refreshes_teacher(self, state: State) -> bool:
        done = state.step - 1
        return bool(self.refresh_every and done and done % self.refresh_every == 0)
