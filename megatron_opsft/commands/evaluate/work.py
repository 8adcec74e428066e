"""The samples of a model that are still to be made: the queue from which engines take them, and the
thread that has them judged and stores them beside the generation.
"""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from itertools import count
from typing import Self

from megatron_opsft.commands.evaluate.benchmarks import Benchmark
from megatron_opsft.data.stored_samples import SampleFiles, StoredSample
from megatron_opsft.records import Outcome, Rollout
from megatron_opsft.rollout.engine import EngineShare
from megatron_opsft.rollout.requests import ResponseRequest
from megatron_opsft.rollout.sampling import EVAL_STEP, response_seed
from megatron_opsft.runtime.job import Job
from megatron_opsft.verify.verifier import Verifier

_Finished = tuple[Rollout, int]
_GATHER_SECONDS = (
    0.2  # every batch takes the interpreter from the engine's loop a few times
)


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
    requests = []
    for benchmark in reversed(benchmarks):
        ids = [benchmark.key(problem.id) for problem in benchmark.problems]
        for key in sorted(ids, key=lambda key: -len(prompts[key])):
            requests += [
                ResponseRequest(
                    problem_id=key,
                    sample_index=index,
                    prompt_ids=prompts[key],
                    seed=response_seed(seed, EVAL_STEP, key, index),
                )
                for index in range(benchmark.samples)
                if (key, index) not in done
            ]
    return requests


# Counters of the job, below a name: what all ranks' scorers of that name stored since this start.
# Samples first: none is read without its tokens.
COUNTED = ("done", "correct", "tokens")


class WorkQueue:
    """One queue for all engines of a job: an engine with room takes the next requests.

    How many are taken is a counter in the job's store. A response does not depend on who makes it.
    """

    def __init__(
        self,
        name: str,
        requests: Sequence[ResponseRequest],
        job: Job,
        share: EngineShare,
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


class Scorer:
    """Use it in a `with`: on exit everything that was put in is judged and stored.

    A finished response is a rollout, whose problem_id is the problem's key, and the number of
    tokens it cost beyond its own. Engines hand it over and continue; judging waits for worker
    processes most of the time, so one thread is enough. An error in it is raised at a later `put`
    or at the end.
    """

    def __init__(
        self,
        verifier: Verifier,
        benchmarks: Sequence[Benchmark],
        files: SampleFiles,
        job: Job,
        name: str,
    ) -> None:
        """name: of the job's counters of what was stored, see `COUNTED`."""
        self._verifier, self._files, self._job, self._name = verifier, files, job, name
        self._problems = {b.key(p.id): p for b in benchmarks for p in b.problems}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._waiting: list[_Finished] = []
        self._judged: Future[None] = Future()  # of the batch before
        self._judged.set_result(None)
        self._begun = 0.0

    def put(self, responses: Sequence[_Finished]) -> None:
        """Judge and store them soon; call it often, with or without responses."""
        self._waiting += responses
        is_time = time.monotonic() - self._begun > _GATHER_SECONDS
        if self._waiting and self._judged.done() and is_time:
            self._begin()

    def _begin(self) -> Future[None]:
        """Judge what waits, after the batch before. Errors: of that batch."""
        self._judged.result()
        batch, self._waiting = self._waiting, []
        self._begun = time.monotonic()
        self._judged = self._thread.submit(self._judge, batch)
        return self._judged

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *unused: object) -> None:
        with self._thread, nullcontext() if kind is None else suppress(Exception):
            self._begin().result()

    def _judge(self, batch: Sequence[_Finished]) -> None:
        verdicts = self._verifier.score(
            [rollout for rollout, _ in batch], self._problems
        )
        rows: dict[str, list[StoredSample]] = {}
        for (rollout, extra_tokens), verdict in zip(batch, verdicts, strict=True):
            benchmark = rollout.problem_id.partition("/")[0]
            problem = self._problems[rollout.problem_id]
            rows.setdefault(benchmark, []).append(
                StoredSample(
                    problem_id=problem.id,
                    sample_index=rollout.sample_index,
                    outcome=verdict.outcome,
                    answer=verdict.answer,
                    gold=problem.answer,
                    finish_reason=rollout.finish_reason,
                    num_tokens=len(rollout.response_ids),
                    extra_tokens=extra_tokens,
                    text=rollout.text,
                )
            )
        for benchmark, samples in rows.items():
            self._files.append(benchmark, samples)
        num_correct = sum(verdict.outcome is Outcome.CORRECT for verdict in verdicts)
        num_tokens = sum(len(rollout.response_ids) + extra for rollout, extra in batch)
        stored = (len(batch), num_correct, num_tokens)
        for what, number in reversed([*zip(COUNTED, stored, strict=True)]):
            self._job.add(f"{self._name}/{what}", number)
