"""ER-RL, of Arora and Zanette: correct responses lose reward as they are longer than the others."""

import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.advantages import Values, leave_one_out, whiten
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.settings import AggregationKey, PolicySettings, State


class ErRl(PolicySettings):
    """Its authors' code has the divergence in the reward of each token; here it is in the loss."""

    formula = "r = 1[correct] (1 - alpha sigma((n - mu)/s)); A = r - mean of the others"
    paper = "Training Language Models to Reason Efficiently, arXiv 2502.04463"
    name: Literal["er_rl"] = "er_rl"
    aggregation: AggregationKey = "sequence"
    alpha: float = Field(0.1, ge=0, lt=1)
    """Reward that length can cost."""
    whiten: Literal["none", "tokens"] = "none"
    """tokens: advantages whitened over the batch's tokens, as in the code."""

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """1 - alpha sigma((n - mu)/s) for the correct ones."""
        if not group.num_correct:
            return [0.0] * len(group.responses)
        scores = sigmoid_of_length(group)
        left = iter([1 - self.alpha * score for score in scores])
        return [next(left) if response.correct else 0.0 for response in group.responses]

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        """Leave one out, then perhaps whitened."""
        lengths = [group.lengths for group in batch]
        return whiten([leave_one_out(r) for r in rewards], lengths, self.whiten, count_less=0)


def sigmoid_of_length(group: Group) -> list[float]:
    """sigma((n - mu) / s) of the correct responses, mu and s (by the count) of their lengths."""
    lengths = group.correct_lengths
    mean, std = fmean(lengths), pstdev(lengths) + 1e-7
    return [1 / (1 + math.exp((mean - length) / std)) for length in lengths]
