"""ER-RL, of Arora and Zanette: correct responses lose reward as they are longer than the others."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Literal

from pydantic import Field

from megatron_opsft.methods.advantages import Values, leave_one_out, whiten
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.objective import Objective, TokenPenalty
from megatron_opsft.methods.settings import AggregationKey, PolicySettings, State


class ErRl(PolicySettings):
    """ER-RL's settings. With `beta` each token pays its own divergence from the reference model."""

    formula = "r = 1[correct] (1 - alpha sigma((n - mu)/s)); A = r - mean of the others"
    paper = "Training Language Models to Reason Efficiently, arXiv 2502.04463"
    name: Literal["er_rl"] = "er_rl"
    aggregation: AggregationKey = "sequence"
    kl: Literal["k1"] = "k1"
    """The divergence of a token: log p - log ref of the policy that sampled."""
    alpha: float = Field(0.1, ge=0, lt=1)
    """Reward that length can cost."""
    whiten: Literal["none", "tokens"] = "none"
    """tokens: advantages whitened over the batch's tokens, as in the code."""

    def objective(self, sampling_temperature: float) -> Objective:
        """Put the divergence into the advantages of the tokens, and not into the loss."""
        plain = super().objective(sampling_temperature)
        if not self.beta:
            return plain
        penalty = TokenPenalty(beta=self.beta, whitens=self.whiten == "tokens")
        return replace(plain, beta=0.0, token_penalty=penalty)

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """1 - alpha sigma((n - mu)/s) for the correct ones."""
        if not group.num_correct:
            return [0.0] * len(group.responses)
        rewards = [0.0] * len(group.responses)
        scores_of_correct = iter(sigmoid_of_length(group))
        for i, response in enumerate(group.responses):
            if response.correct:
                rewards[i] = 1 - self.alpha * next(scores_of_correct)
        return rewards

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        """r - mean of the others, whitened if asked for.

        With a divergence the advantages still change token by token, and are whitened afterwards
        (`TokenPenalty.whitens`).
        """
        plain = [leave_one_out(r) for r in rewards]
        if self.beta:
            return plain
        lengths = [group.lengths for group in batch]
        return whiten(plain, lengths, self.whiten, count_less=0)


def sigmoid_of_length(group: Group) -> list[float]:
    """sigma((n - mu) / s) of each correct response; mu and s (divided by the count) of theirs."""
    lengths = group.correct_lengths
    mean, std = fmean(lengths), pstdev(lengths) + 1e-7
    return [1 / (1 + math.exp((mean - length) / std)) for length in lengths]
