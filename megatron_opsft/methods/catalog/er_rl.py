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
from megatron_opsft.methods.policy import PolicySettings
from megatron_opsft.methods.settings import AggregationKey, State


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
        rewards = group.verdicts
        for i, score in sigmoid_of_length(group).items():
            rewards[i] -= self.alpha * score
        return rewards

    def group_advantages(self, group: Group, rewards: list[float]) -> list[float]:
        return leave_one_out(rewards)

    def advantages(self, batch: Sequence[Group], rewards: Values) -> Values:
        """r - mean of the others, whitened if asked for.

        With a divergence the advantages still change token by token, and are whitened afterwards
        (`TokenPenalty.whitens`).
        """
        plain = super().advantages(batch, rewards)
        if self.beta:
            return plain
        lengths = [group.lengths for group in batch]
        return whiten(plain, lengths, self.whiten, count_less=0)


def sigmoid_of_length(group: Group) -> dict[int, float]:
    """Index of each correct response -> sigma((n - mu) / s); mu and s (divided by the count) are
    those of the correct ones.
    """
    lengths = {i: r.num_tokens for i, r in enumerate(group.responses) if r.correct}
    if not lengths:
        return {}
    mean, std = fmean(lengths.values()), pstdev(lengths.values()) + 1e-7
    return {i: 1 / (1 + math.exp((mean - n) / std)) for i, n in lengths.items()}
