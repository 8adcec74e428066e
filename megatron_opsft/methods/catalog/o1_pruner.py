"""O1-Pruner: rewards length and accuracy against the reference model's, on responses of the policy
or on a fixed data set of the reference model's responses.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from megatron_opsft.errors import UserError
from megatron_opsft.methods.advantages import Values, z_score
from megatron_opsft.methods.facts import Group, ReferenceStatistics
from megatron_opsft.methods.objective import Objective, SequenceClip
from megatron_opsft.methods.policy import PolicySettings
from megatron_opsft.methods.settings import AggregationKey, RunSize, Samples, State
from megatron_opsft.section import BY_CONTENT, Expanded


class O1Pruner(PolicySettings):
    """O1-Pruner's settings. clip_rewards and z_score are of the authors' code, not of the paper."""

    formula = "A = Lref/n - 1 + lambda (1[correct] - Aref), clipped by whole responses"
    paper = "O1-Pruner, arXiv 2501.12570"
    measures_length = True
    needs = (
        "lengths and accuracy of the reference model (method.references), or fixed data",
    )
    name: Literal["o1_pruner"] = "o1_pruner"
    aggregation: AggregationKey = "sequence_sum"
    form: Literal["online", "fixed"] = "online"
    """Responses of the policy, or the reference model's from a fixed data set."""
    references: Annotated[Path | None, Expanded, BY_CONTENT] = None
    """Lines of JSON: problem_id, mean_tokens (the mean of what method.length_of counts) and
    accuracy of the reference model.
    """
    accuracy_weight: NonNegativeFloat = 2.0
    """Lambda, of accuracy against length."""
    clip_rewards: bool = False
    """Rewards lie within -2 and 4."""
    z_score: bool = False
    """Advantages have mean 0 and deviation 1, in the batch or over all fixed data."""
    samples: Samples = 16
    samples_kept: int = Field(2, ge=1)
    """How many of them to train on, chosen at random."""

    @property
    def has_fixed_data(self) -> bool:
        return self.form == "fixed"

    @property
    def num_data_samples(self) -> int:
        return self.samples

    @property
    def reference_file(self) -> Path | None:
        return self.references

    @property
    def compares_group(self) -> bool:
        return False

    def objective(self, sampling_temperature: float) -> Objective:
        """Return a loss that clips whole responses, even if each batch has only one update, where
        other methods take the plain likelihood.
        """
        clip = SequenceClip(low=self.clip_low, high=self.clip_high)
        return replace(super().objective(sampling_temperature), surrogate=clip)

    def check(self, run: RunSize) -> None:
        """Check also that the online form has reference lengths."""
        super().check(run)
        if self.form == "online" and self.references is None:
            raise UserError(
                "method.references is missing: set it to a file with each problem's mean response "
                "tokens and accuracy under the reference model; or train on fixed data: set "
                "method.form=fixed, and data.responses to a file that `megatron-opsft data "
                "o1_pruner CONFIG method.form=fixed --out FILE` wrote"
            )

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """Lref/n - 1 + lambda (c - Aref); for fixed data the advantage in the file."""
        if self.form == "fixed":
            return group.stored_advantages
        assert group.reference is not None, "a run has looked for it"
        return self.against(group.reference, group)

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        """The rewards themselves, or their z-scores."""
        if self.z_score and self.form == "online":
            return z_score(rewards)
        return rewards

    def against(self, reference: ReferenceStatistics, group: Group) -> list[float]:
        """Rewards of the responses to one problem, compared with the reference model's. A length
        of 0 counts as 1.
        """
        rewards = []
        for verdict, length in zip(group.verdicts, group.lengths, strict=True):
            length_reward = reference.mean_tokens / max(length, 1) - 1
            accuracy_reward = verdict - reference.accuracy
            reward = length_reward + self.accuracy_weight * accuracy_reward
            if self.clip_rewards:
                reward = min(max(reward, -2.0), 4.0)
            rewards.append(reward)
        return rewards
