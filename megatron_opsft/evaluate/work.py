"""The samples that are still to be made, in the order in which they should begin, and the queue
from which the engines take them.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import count

from megatron_opsft.evaluate.benchmarks import Benchmark
from megatron_opsft.rollout.engine import EngineShare
from megatron_opsft.rollout.requests import ResponseRequest
from megatron_opsft.rollout.sampling import EVAL_STEP, response_seed
from megatron_opsft.runtime.job import Job


def missing_requests(
    benchmarks: Sequence[Benchmark],
    prompts: Mapping[str, tuple[int, ...]],
    done: Collection[tuple[str, int]],
    seed: int,
) -> list[ResponseRequest]:
    """Requests for what is missing; the last benchmarks first: they have the longest answers.
    Within a benchmark by falling length of the prompts, so that a batch has little padding.

    prompts: problem key -> ids. done: (problem key, sample index) that are there. The same on every
    rank.
    """
    return [
        ResponseRequest(
            problem_id=benchmark.key(problem.id),
            sample_index=index,
            prompt_ids=prompts[benchmark.key(problem.id)],
            seed=response_seed(seed, EVAL_STEP, benchmark.key(problem.id), index),
        )
        for benchmark in reversed(benchmarks)
        for problem in sorted(
            benchmark.problems, key=lambda problem: -len(prompts[benchmark.key(problem.id)])
        )
        for index in range(benchmark.samples)
        if (benchmark.key(problem.id), index) not in done
    ]


class Tally:
    """What all ranks stored since this start, counted in the job's store."""

    def __init__(self, job: Job, name: str) -> None:
        """name: of this part of the job."""
        self._job, self._name = job, name

    def add(self, *, samples: int, correct: int = 0, tokens: int) -> None:
        """Count these; samples last, so that none is counted without its tokens."""
        for what, number in (("correct", correct), ("tokens", tokens), ("done", samples)):
            self._job.add(f"{self._name}/{what}", number)

    def read(self) -> tuple[int, int, int]:
        """Samples, correct ones among them, and tokens; all only grow."""
        samples, correct, tokens = (
            self._job.add(f"{self._name}/{what}", 0) for what in ("done", "correct", "tokens")
        )
        return samples, correct, tokens


class WorkQueue:
    """One queue for all engines of a job: an engine with room takes the next requests.

    How many are taken is a counter in the job's store. A response does not depend on who makes it.
    """

    def __init__(
        self, name: str, requests: Sequence[ResponseRequest], job: Job, share: EngineShare
    ) -> None:
        """name: of this queue among all of the job; requests: the same on all ranks."""
        self._name, self._requests, self._job, self._share = name, requests, job, share
        # At the start none takes what leaves another idle.
        self._most = -(-len(requests) // share.count)
        self._takes = count()

    def take(self, room: int) -> Sequence[ResponseRequest]:
        """See `rollout.engine.Take`.

        The other ranks of a tensor-parallel engine get what its first one takes.
        """
        key = f"{self._name}/take/{self._share.index}/{next(self._takes)}"
        if not self._share.answers:
            start, stop = json.loads(self._job.get(key))
        else:
            wanted = min(room, self._most)
            stop = self._job.add(f"{self._name}/taken", wanted)
            start = stop - wanted
            if self._share.num_ranks > 1:
                self._job.put(key, json.dumps((start, stop)))
        return self._requests[start:stop]
