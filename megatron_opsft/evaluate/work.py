"""The samples that are still to be made, dealt out to engines as each has room for more.

The work is cut into tickets: some samples of one problem. A shared counter says which ticket is
next, so an engine that was dealt short answers takes more tickets. Towards the end engines take
less at a time than they have room for, so that all of them end together. A sample does not depend
on who makes it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from megatron_opsft.evaluate.benchmarks import Benchmark
from megatron_opsft.rollout.engine import PromptRequest, Replica
from megatron_opsft.rollout.sampling import EVAL_STEP, response_seed
from megatron_opsft.runtime.job import Job

TICKET_SAMPLES = 16


def make_tickets(
    benchmarks: Sequence[Benchmark],
    prompts: Mapping[str, tuple[int, ...]],
    done: dict[str, set[tuple[str, int]]],
    seed: int,
    ticket_samples: int = TICKET_SAMPLES,
) -> list[PromptRequest]:
    """Requests for what is missing; the last benchmarks first: they have the longest answers.
    Within a benchmark by falling length of the prompts, so that a batch has little padding.

    prompts: key -> prompt ids. done: benchmark -> (problem id, sample index) that are there. The
    same on every rank.
    """
    tickets = []
    for benchmark in reversed(benchmarks):
        lengths = {p.id: len(prompts[benchmark.key(p.id)]) for p in benchmark.problems}
        for problem in sorted(benchmark.problems, key=lambda p: -lengths[p.id]):
            key = benchmark.key(problem.id)
            missing = [
                index
                for index in range(benchmark.samples)
                if (problem.id, index) not in done[benchmark.name]
            ]
            for start in range(0, len(missing), ticket_samples):
                indices = tuple(missing[start : start + ticket_samples])
                tickets.append(
                    PromptRequest(
                        problem_id=key,
                        prompt_ids=prompts[key],
                        sample_indices=indices,
                        seeds=tuple(response_seed(seed, EVAL_STEP, key, i) for i in indices),
                    )
                )
    return tickets


class WorkQueue:
    """Deals tickets to one replica; `take` is what its engine calls, on each of its ranks."""

    def __init__(
        self, name: str, tickets: Sequence[PromptRequest], job: Job, replica: Replica
    ) -> None:
        """name: of this queue among all of the job; all ranks bring the same tickets."""
        self._name, self._tickets, self._job, self._replica = name, tickets, job, replica
        self._rest: list[tuple[int, int]] = []  # (ticket, first sample) begun but not used up
        self._num_takes = 0
        self._left = sum(len(ticket.seeds) for ticket in tickets)

    def take(self, room: int) -> list[PromptRequest]:
        """See `rollout.engine.Take`."""
        self._num_takes += 1
        name = f"{self._name}/{self._replica.index}/{self._num_takes}"
        if not self._replica.answers:  # another tensor-parallel rank of the same engine decides
            return self._requests(json.loads(self._job.get(name)))
        parts = self._claim(self._fair(room))
        if self._replica.count < self._job.world_size:
            self._job.put(name, json.dumps(parts))
        return self._requests(parts)

    def _fair(self, room: int) -> int:
        """At most half of this replica's share of what is left, in whole tickets, but one."""
        if self._replica.count == 1:
            return room
        left = self._left - self._job.add(f"{self._name}/samples", 0)
        tickets = left // (2 * self._replica.count * TICKET_SAMPLES)
        return min(room, max(tickets, 1) * TICKET_SAMPLES)

    def _claim(self, room: int) -> list[tuple[int, int, int]]:
        """(ticket, first sample, sample behind the last) of new work for at most `room` samples."""
        parts = []
        while room > 0:
            if self._rest:
                ticket, start = self._rest.pop()
            else:
                ticket, start = self._job.add(f"{self._name}/tickets", 1) - 1, 0
                if ticket >= len(self._tickets):
                    break
                self._job.add(f"{self._name}/samples", len(self._tickets[ticket].seeds))
            size = len(self._tickets[ticket].seeds)
            stop = min(size, start + room)
            parts.append((ticket, start, stop))
            room -= stop - start
            if stop < size:
                self._rest.append((ticket, stop))
        return parts

    def _requests(self, parts: Iterable[Sequence[int]]) -> list[PromptRequest]:
        requests = []
        for ticket, start, stop in parts:
            whole = self._tickets[ticket]
            requests.append(
                replace(
                    whole,
                    sample_indices=whole.sample_indices[start:stop],
                    seeds=whole.seeds[start:stop],
                )
            )
        return requests
