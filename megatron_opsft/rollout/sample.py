"""Responses to problems, shared out over the ranks: what the loop and the evaluation both call."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megatron_opsft.data.prompts import PromptEncoder
from megatron_opsft.records import Problem, Rollout
from megatron_opsft.rollout.engine import RolloutEngine, SamplingSettings
from megatron_opsft.rollout.requests import deal_evenly, make_requests
from megatron_opsft.runtime.distributed import (
    Layout,
    any_over_world,
    deal,
    gather_from_all,
)
from megatron_opsft.runtime.phase import Interrupted, expect, is_interruptible


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Samples on this rank its part of the responses to a batch of problems.

    A response depends on (seed, step, problem id, sample index) and the weights, not on the number
    of ranks: but for the rounding of logits, which may move a draw, in float32 very rarely.
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
        """This rank's part of `num_samples` responses to each problem; called by every rank.

        Every engine makes an equal part. step: what the seeds of the responses depend on; encode:
        the prompts, if not the template's.

        A problem that comes twice (a data set smaller than a batch) gets twice as many, all
        different.
        """
        encode = encode or self.encoder.encode
        groups = [
            make_requests(
                problem.id, encode(problem), times * num_samples, self.seed, step
            )
            for problem, times in Counter(problems).items()
        ]
        groups.sort(key=lambda group: -len(group[0].prompt_ids))
        share = self.engine.share
        mine = deal_evenly(groups, share.count)[share.index]
        expect(len(mine), len(mine) * settings.max_response_tokens)
        rollouts = _together(lambda: self.engine.generate(mine, settings))
        if share.count == self.layout.world_size:
            return rollouts
        return self._share_out(rollouts)

    def _share_out(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Fewer engines than ranks: every rank takes part in what follows, the verification."""
        counts = gather_from_all([len(rollouts)])
        first, total = sum(counts[: self.layout.rank]), sum(counts)
        items_for: dict[int, list[Rollout]] = {}
        for index, rollout in enumerate(rollouts, start=first):
            rank = index * self.layout.world_size // total
            items_for.setdefault(rank, []).append(rollout)
        return deal(items_for)


def _together(make: Callable[[], list[Rollout]]) -> list[Rollout]:
    """What is made. Errors: `Interrupted` on every rank where one was interrupted."""
    if not is_interruptible():
        return make()
    made = None
    with suppress(Interrupted):
        made = make()
    if any_over_world(made is None) or made is None:
        raise Interrupted
    return made
