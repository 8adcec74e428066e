"""Sample responses to problems, divided among the ranks, in training and evaluation."""

from collections import Counter
from collections.abc import Callable, Sequence

from megatron_opsft.data.prompts import PromptEncoder
from megatron_opsft.records import Problem, Rollout, TokenIds, record
from megatron_opsft.rollout.engine import RolloutEngine, SamplingSettings
from megatron_opsft.rollout.requests import ResponseRequest, deal_evenly, make_requests
from megatron_opsft.runtime.distributed import (
    Layout,
    any_over_world,
    deal,
    gather_from_all,
)
from megatron_opsft.runtime.phase import Interrupted, expect, is_interruptible


@record
class Sampler:
    """Samples this rank's share of the responses to a batch of problems.

    A response depends on (seed, step, problem id, sample index) and the weights. It does not depend
    on the number of ranks, except that another rounding of logits may, very rarely in float32,
    change a token.
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
        encode: Callable[[Problem], TokenIds] | None = None,
    ) -> list[Rollout]:
        """Return this rank's share of `num_samples` responses to each problem. Every rank calls it.

        All engines make equally many responses. A problem that comes twice, which happens if a data
        set is smaller than a batch, gets twice as many, all different.
        step: changes the seeds of the responses. encode: makes prompts, instead of the template.
        """
        encode = encode or self.encoder.encode
        groups = [
            make_requests(
                problem.id,
                encode(problem),
                times * num_samples,
                self.seed,
                step,
            )
            for problem, times in Counter(problems).items()
        ]
        groups.sort(key=lambda group: -len(group[0].prompt_ids))
        share = self.engine.share
        requests = deal_evenly(groups, share.count)[share.index]
        expect(len(requests), len(requests) * settings.max_response_tokens)
        rollouts = self._generate(requests, settings)
        if share.count < self.layout.world_size:
            rollouts = self._share_out(rollouts)
        return rollouts

    def _generate(
        self, requests: Sequence[ResponseRequest], settings: SamplingSettings
    ) -> list[Rollout]:
        """Generate the rollouts. Errors: `Interrupted` on every rank if one was interrupted."""
        if not is_interruptible():
            return self.engine.generate(requests, settings)
        rollouts: list[Rollout] = []
        is_interrupted = False
        try:
            rollouts = self.engine.generate(requests, settings)
        except Interrupted:
            is_interrupted = True
        if any_over_world(is_interrupted):
            raise Interrupted
        return rollouts

    def _share_out(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Divide the rollouts of fewer engines among all ranks, which verify them next: each rank
        gets a share of all rollouts, counted in the order of the ranks that have them.
        """
        counts = gather_from_all([len(rollouts)])
        num_before, total = sum(counts[: self.layout.rank]), sum(counts)
        rollouts_for: dict[int, list[Rollout]] = {}
        for index, rollout in enumerate(rollouts, start=num_before):
            rank = index * self.layout.world_size // total
            rollouts_for.setdefault(rank, []).append(rollout)
        return deal(rollouts_for)
