"""Methods in which a response pays for its length beside the other responses to its problem: ER-RL,
DDCA, Kimi k1.5's, SmartThinker, prime-rl's linear penalty, GR3, the mastery-gated one and HMPO.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median, pstdev, pvariance
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from megatron_opsft.methods.advantages import Values, leave_one_out, whiten
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.objective import (
    Objective,
    SquaredLogRatio,
    Surrogate,
    TokenPenalty,
)
from megatron_opsft.methods.policy import GroupNormalizedSettings, PolicySettings
from megatron_opsft.methods.settings import AggregationKey, MethodState, State


class ErRl(PolicySettings):
    """ER-RL, of Arora and Zanette: correct responses lose reward as they are longer than others.

    With `beta` each token pays its own divergence from the reference model.
    """

    formula = "r = 1[correct] (1 - alpha sigma((n - mu)/s)); A = r - mean of the others"
    paper = "Training Language Models to Reason Efficiently, arXiv 2502.04463"
    measures_length = True
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
        counts = [group.token_counts for group in batch]
        return whiten(plain, counts, self.whiten, count_less=0)


class Ddca(GroupNormalizedSettings):
    """DDCA: an advantage of length among the correct responses, as strong as the pass rate."""

    formula = "A = (r - mean)/std - 0.2 pass_rate (s - mean s) if correct, s = sigma((n - mu)/std)"
    paper = "DDCA, arXiv 2602.02099"
    measures_length = True
    name: Literal["ddca"] = "ddca"
    length_weight: NonNegativeFloat = 0.2
    """Weight of the length advantage."""

    def group_advantages(self, group: Group, rewards: list[float]) -> list[float]:
        """Return (r - mean r) / std r, and for a correct response less w pass_rate (s - mean s).

        s: `sigmoid_of_length`, whose mean is that of the correct responses. w: `length_weight`.
        """
        advantages = super().group_advantages(group, rewards)
        scores = sigmoid_of_length(group)
        if scores:
            mean = fmean(scores.values())
            weight = self.length_weight * group.pass_rate
            for i, score in scores.items():
                advantages[i] -= weight * (score - mean)
        return advantages


def sigmoid_of_length(group: Group) -> dict[int, float]:
    """Index of each correct response -> sigma((n - mu) / s); mu and s (divided by the count) are
    those of the correct ones.
    """
    pairs = enumerate(group.lengths)
    lengths = {i: length for i, length in pairs if group.responses[i].correct}
    if not lengths:
        return {}
    mean = fmean(lengths.values())
    std = pstdev(lengths.values()) + 1e-7  # not 0 if all are equally long
    return {i: 1 / (1 + math.exp((mean - n) / std)) for i, n in lengths.items()}


class Kimi(PolicySettings):
    """Kimi k1.5's length penalty, and its update with a squared log-ratio.

    The report states neither weight nor tau nor warm-up: ours.
    """

    formula = "r = 1[correct] + w (1/2 - (n - min)/(max - min)), of wrong ones <= 0; A = r - mean"
    paper = "Kimi k1.5, arXiv 2501.12599"
    measures_length = True
    name: Literal["kimi"] = "kimi"
    aggregation: AggregationKey = "sequence_sum"
    weight: NonNegativeFloat = 1.0
    """Weight of the length reward."""
    warmup_steps: NonNegativeInt = 0
    """Steps without the length reward."""
    tau: NonNegativeFloat = 0.1
    """Of A log p - tau/2 (log p/old)^2 of whole responses; without effect in the first update."""

    @property
    def surrogate(self) -> Surrogate:
        return SquaredLogRatio(tau=self.tau)

    def group_rewards(self, group: Group, state: MethodState) -> list[float]:
        """1[correct] + w x, x = 1/2 - (n - min)/(max - min); x is at most 0 for a wrong answer."""
        shortest, longest = min(group.lengths), max(group.lengths)
        if state.step <= self.warmup_steps or shortest == longest:
            return group.verdicts
        rewards = []
        for verdict, length in zip(group.verdicts, group.lengths, strict=True):
            score = 0.5 - (length - shortest) / (longest - shortest)
            if not verdict:
                score = min(0.0, score)
            rewards.append(verdict + self.weight * score)
        return rewards


class SmartThinker(GroupNormalizedSettings):
    """SmartThinker: correct responses pay for tokens beyond the length of best accuracy, but never
    so much that their advantage becomes negative.
    """

    formula = "r = 1[correct] - a (n - l*)+ of correct ones, a such that their A >= 0"
    paper = "SmartThinker, arXiv 2603.08000"
    measures_length = True
    name: Literal["smart_thinker"] = "smart_thinker"

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """1[correct] - a d. d is the number of tokens beyond l* of a correct response, 0 for a
        wrong one; `a` is such that the longest correct response earns the group's mean reward.
        """
        rewards = group.verdicts
        if not 0 < group.pass_rate < 1:
            return rewards
        best = best_length(group)
        pairs = zip(group.verdicts, group.lengths, strict=True)
        beyond = [max(length - best, 0.0) * verdict for verdict, length in pairs]
        if not any(beyond):
            return rewards
        # The price a of a token: 1 - a max(d) = pass_rate - a mean(d). Wrong responses have d = 0:
        # max(d) > mean(d).
        price = (1 - group.pass_rate) / (max(beyond) - fmean(beyond))
        return [
            reward - price * num_tokens
            for reward, num_tokens in zip(rewards, beyond, strict=True)
        ]


def best_length(group: Group) -> float:
    """The length l* at which the share of correct responses is largest.

    All lengths and the correct ones (mean m, m_c; variance v, v_c) are taken as normally
    distributed: l* = (v_c m - v m_c)/(v_c - v), clipped to the group's lengths. It is the shortest
    length if that ratio of densities has no peak.
    """
    lengths, correct = group.lengths, group.correct_lengths
    v, v_c = pvariance(lengths), pvariance(correct)
    if v_c >= v:
        return min(lengths)
    peak = (v_c * fmean(lengths) - v * fmean(correct)) / (v_c - v)
    return min(max(peak, min(lengths)), max(lengths))


class Linear(PolicySettings):
    """prime-rl's linear length penalty."""

    formula = "r = 1[correct] - 0.25 pass_rate n/max n; A = r - mean"
    paper = "prime-rl, pull request 2901"
    measures_length = True
    name: Literal["linear"] = "linear"
    weight: NonNegativeFloat = 0.25
    """Weight of the length penalty."""
    only_correct: bool = False
    """Only correct responses pay it (prime-rl, pull request 3376)."""

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """c - w pass_rate n / max n; 0 for a wrong response if only correct ones pay."""
        price = self.weight * group.pass_rate / max(1, *group.lengths)
        rewards = []
        for reward, length in zip(group.verdicts, group.lengths, strict=True):
            if reward or not self.only_correct:
                reward -= price * length
            rewards.append(reward)
        return rewards


class Gr3(GroupNormalizedSettings):
    """GR3: divides a reward by a price that grows with n / mean n, the mean of the group.

    The authors choose alpha in a short run beforehand; here it is a key.
    """

    formula = "r = 1[correct] / (1 + alpha n/mean n)"
    paper = "GR3, arXiv 2603.10535"
    measures_length = True
    name: Literal["gr3"] = "gr3"
    alpha: NonNegativeFloat = 0.33
    """How much length costs; for chat 0.00133."""

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """c / (1 + alpha n / mean n), the mean over right and wrong responses."""
        mean = fmean(group.lengths) or 1.0  # if no response thinks
        pairs = zip(group.verdicts, group.lengths, strict=True)
        return [verdict / (1 + self.alpha * length / mean) for verdict, length in pairs]

    def keeps(self, group: Group, rewards: Sequence[float]) -> bool:
        """Drop also groups in which all are correct: a right answer of mean length would lose."""
        return group.pass_rate < 1 and super().keeps(group, rewards)


class MasteryGated(GroupNormalizedSettings):
    """Mastery-gated length penalty: paid only if every response to the problem is correct.

    The paper does not state the weight of the penalty; 1.0 is our choice.
    """

    formula = "all correct: r = 1 - w (n - median)+/(max - median), else 1[correct]"
    paper = "CoT Compression with One-Domain-to-All Generalization, arXiv 2601.06052"
    measures_length = True
    name: Literal["mastery_gated"] = "mastery_gated"
    weight: NonNegativeFloat = 1.0
    """Weight of the length penalty."""

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """1 - w (n - median)+/(max - median) if all are correct, else 1[correct]."""
        rewards = group.verdicts
        if group.pass_rate < 1:
            return rewards
        middle = median(group.lengths)
        spread = max(group.lengths) - middle
        for i, length in enumerate(group.lengths):
            if length > middle:
                rewards[i] = 1 - self.weight * (length - middle) / spread
        return rewards


class Hmpo(GroupNormalizedSettings):
    """HMPO: a correct response beyond the median length of the correct ones loses reward, on a
    cosine that ends at the length limit.

    The median as a budget, the cosine and the product with correctness are the paper's abstract,
    which is all that we could read; where the cosine begins (1, at the budget) and ends (0, at the
    limit), and the settings, are ours.
    """

    formula = (
        "r = 1[correct] (1 + cos(pi (n - median)+/(L - median)))/2, median of correct n"
    )
    paper = "HMPO, arXiv 2606.01934"
    measures_length = True
    name: Literal["hmpo"] = "hmpo"

    def group_rewards(self, group: Group, state: State) -> list[float]:
        """c (1 + cos(pi (n - b)+/(L - b)))/2, b the median of correct lengths; all 0 if none is
        correct.
        """
        rewards = group.verdicts
        if not group.num_correct:
            return rewards
        budget = median(group.correct_lengths)
        for i, length in enumerate(group.lengths):
            if length > budget:
                share = min((length - budget) / (group.limit - budget), 1.0)
                rewards[i] *= (1 + math.cos(math.pi * share)) / 2
        return rewards
