"""Responses to problems, shared out over the ranks: what the loop and the evaluation both call."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from megatron_opsft.data.prompts import PromptEncoder
from megatron_opsft.records import Problem, Rollout
from megatron_opsft.rollout.dealing import WorkQueue, deal_evenly
from megatron_opsft.rollout.engine import RolloutEngine, SamplingSettings
from megatron_opsft.rollout.requests import PromptRequest, dealt_size, make_request, my_share
from megatron_opsft.runtime.distributed import Layout, any_over_world, deal, gather_from_all
from megatron_opsft.runtime.job import Job
from megatron_opsft.runtime.phase import Interrupted, expect, is_interruptible


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Samples on this rank its share of a batch of problems.

    A response depends on (seed, step, problem id, sample index) and the weights, not on the number
    of ranks: but for the rounding of logits, which in bfloat16 may move a draw.
    steals: an engine with room takes what another has not begun; `job`: where they agree on it.
    """

    engine: RolloutEngine
    encoder: PromptEncoder
    layout: Layout
    seed: int
    job: Job
    steals: bool = False
    _calls: Iterator[int] = field(default_factory=count)

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
        if self.steals:
            return self._by_room(requests, settings)
        return self._in_shares(requests, settings, num_samples)

    def _in_shares(
        self, requests: Sequence[PromptRequest], settings: SamplingSettings, num_samples: int
    ) -> list[Rollout]:
        """Every engine makes what it is dealt at the beginning: whole batches, or whole groups."""
        replica = self.engine.replica
        together = num_samples
        if replica.batch_size is not None:
            num_responses = sum(len(request.seeds) for request in requests)
            together = dealt_size(num_responses, replica.batch_size, replica.count)
        mine = my_share(requests, together, replica.number, replica.count)
        num_responses = sum(len(request.sample_indices) for request in mine)
        expect(num_responses, "responses", num_responses * settings.max_response_tokens)
        rollouts = _together(lambda: self.engine.generate(mine, settings))
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

    def _by_room(
        self, requests: Sequence[PromptRequest], settings: SamplingSettings
    ) -> list[Rollout]:
        """Every engine begins with an equal part. Whoever made a response, it ends up on the rank
        whose part it was, in the order of the parts.
        """
        longest_first = sorted(requests, key=lambda request: -len(request.prompt_ids))
        replica = self.engine.replica
        parts = deal_evenly(longest_first, replica.count)
        queue = WorkQueue(f"rollout{next(self._calls)}", parts, self.job, replica)
        num_responses = len(parts[replica.number])
        expect(num_responses, "responses", num_responses * settings.max_response_tokens)
        finished = self.engine.stream(queue.take, settings)
        made = _together(lambda: [rollout for rollouts in finished for rollout in rollouts])
        order = {_key(request): n for n, request in enumerate(r for part in parts for r in part)}
        items_for: dict[int, list[Rollout]] = {}
        for rollout in made:
            number = order[rollout.problem_id, rollout.sample_index]
            home = number * self.layout.world_size // len(order)
            items_for.setdefault(home, []).append(rollout)
        mine = deal(items_for)
        queue.forget()
        return sorted(mine, key=lambda r: order[r.problem_id, r.sample_index])


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


def _key(single: PromptRequest) -> tuple[str, int]:
    return single.problem_id, single.sample_indices[0]
