"""Responses to problems, shared out over the ranks: what the loop and the evaluation both call."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_opsft.data.prompts import PromptEncoder
from megatron_opsft.records import Problem, Rollout
from megatron_opsft.rollout.engine import (
    PromptRequest,
    RolloutEngine,
    SamplingSettings,
    dealt_size,
    make_request,
    my_share,
)
from megatron_opsft.runtime.distributed import Layout, deal, gather_from_all
from megatron_opsft.runtime.phase import expect


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Samples on this rank its share of a batch of problems.

    A response depends on (seed, step, problem id, sample index) and the weights, not on the number
    of ranks: but for the rounding of logits, which in bfloat16 may move a draw.
    """

    engine: RolloutEngine
    encoder: PromptEncoder
    layout: Layout
    seed: int

    def sample(
        self,
        problems: Sequence[Problem],
        settings: SamplingSettings,
        *,
        num_samples: int,
        step: int,
        encode: Callable[[Problem], tuple[int, ...]] | None = None,
    ) -> list[Rollout]:
        """`num_samples` responses to each of this rank's part of `problems`; called by every rank.

        step: what the seeds of the responses depend on; encode: the prompts, if not the template's.

        A problem that comes twice (a data set smaller than a batch) gets twice as many, all
        different.
        """
        encode = encode or self.encoder.encode
        requests = [
            make_request(problem.id, encode(problem), times * num_samples, self.seed, step)
            for problem, times in Counter(problems).items()
        ]
        replica = self.engine.replica
        mine: list[PromptRequest] = []
        if replica.index is not None:
            together = num_samples
            if replica.batch_size is not None:
                num_responses = num_samples * len(problems)
                together = dealt_size(num_responses, replica.batch_size, replica.count)
            mine = my_share(requests, together, replica.index, replica.count)
        expect(sum(len(request.sample_indices) for request in mine), "responses")
        rollouts = self.engine.generate(mine, settings)
        if replica.count == self.layout.world_size:
            return rollouts
        return self._share_out(rollouts)

    def _share_out(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Fewer engines than ranks: every rank takes part in what follows, the verification."""
        counts = gather_from_all([len(rollouts)])
        first, total = sum(counts[: self.layout.rank]), sum(counts)
        items_for: dict[int, list[Rollout]] = {}
        for number, rollout in enumerate(rollouts, start=first):
            rank = number * self.layout.world_size // total
            items_for.setdefault(rank, []).append(rollout)
        return deal(items_for)
