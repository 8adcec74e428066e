"""The missing samples of a model: the queue from which engines take requests, and the thread that
judges and stores finished responses while engines generate.
"""

import json
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Self

from megatron_opsft.commands.evaluate.benchmarks import Benchmark
from megatron_opsft.data.stored_samples import SampleFiles, StoredSample
from megatron_opsft.records import Problem, Rollout, TokenIds, Verdict
from megatron_opsft.rollout.engine import EngineShare
from megatron_opsft.rollout.requests import ResponseRequest, make_requests
from megatron_opsft.rollout.sampling import EVAL_STEP
from megatron_opsft.rollout.token_use import TokenMeter
from megatron_opsft.runtime.job import Job
from megatron_opsft.runtime.rounding import ceil_div
from megatron_opsft.verify.verifier import FAILURES, Verifier

FinishedResponse = tuple[Rollout, int]
"""A rollout, whose problem_id is the problem's key, and how many tokens were sampled for it beyond
its own.
"""
# At least so long between two batches: each takes the interpreter from the engine's loop.
_GATHER_SECONDS = 0.2


def missing_requests(
    benchmarks: Sequence[Benchmark],
    prompts: Mapping[str, TokenIds],
    done: Collection[tuple[str, int]],
    seed: int,
) -> list[ResponseRequest]:
    """Return the requests for all missing samples, the same on every rank.

    The last benchmarks come first: they have the longest answers. Within a benchmark the longest
    prompts come first, so that a batch has little padding. prompts: problem key -> token ids. done:
    (problem key, sample index) of the stored samples.
    """
    requests = []
    for benchmark in reversed(benchmarks):
        keys = benchmark.problems_by_key()
        for key in sorted(keys, key=lambda key: -len(prompts[key])):
            group = make_requests(key, prompts[key], benchmark.samples, seed, EVAL_STEP)
            requests += [
                request for request in group if (key, request.sample_index) not in done
            ]
    return requests


# The job's counters, below a name: what the scorers of that name on all ranks stored since this
# start. Read them in this order: they are written in the other, so that no sample is read without
# its tokens.
COUNTERS = ("done", "correct", "tokens")


class WorkQueue:
    """One queue for all engines of a job: an engine with room takes the next requests.

    A counter in the job's store says how many are taken. A response does not depend on the engine
    that samples it.
    """

    def __init__(
        self,
        name: str,
        requests: Sequence[ResponseRequest],
        job: Job,
        share: EngineShare,
    ) -> None:
        """name: no other queue of the job has it. requests: the same on all ranks."""
        self._name = name
        self._requests = requests
        self._job = job
        self._share = share
        # An engine takes at most its share at once, so that none is idle at the start.
        self._max_taken = ceil_div(len(requests), share.count)
        self._takes = count()

    def take(self, room: int) -> Sequence[ResponseRequest]:
        """Take the next requests, see `rollout.engine.Take`.

        The other ranks of a tensor-parallel engine get what its first rank takes.
        """
        key = f"{self._name}/take/{self._share.index}/{next(self._takes)}"
        if self._share.answers:
            num_wanted = min(room, self._max_taken)
            stop = self._job.add(f"{self._name}/taken", num_wanted)  # the new total
            start = stop - num_wanted
            if self._share.num_ranks > 1:
                self._job.put(key, json.dumps((start, stop)))
        else:
            start, stop = json.loads(self._job.get(key))
        return self._requests[start:stop]


class Scorer:
    """Judges and stores finished responses. Use it in a `with`: on exit all of them are stored.

    Engines hand responses over and continue. Judging waits for worker processes most of the time,
    so one thread is enough. An error in it is raised at a later `put` or at the end.
    """

    def __init__(
        self,
        verifier: Verifier,
        meter: TokenMeter,
        benchmarks: Sequence[Benchmark],
        files: SampleFiles,
        job: Job,
        name: str,
    ) -> None:
        """name: prefix of the job's counters of stored samples, see `COUNTERS`."""
        self._verifier = verifier
        self._meter = meter
        self._files = files
        self._job = job
        self._name = name
        self._problems: dict[str, Problem] = {}
        for benchmark in benchmarks:
            self._problems |= benchmark.problems_by_key()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._waiting: list[FinishedResponse] = []
        self._judged: list[tuple[FinishedResponse, Verdict]] = []
        self._last_batch: Future[None] = Future()
        self._last_batch.set_result(None)
        self._started = 0.0

    def put(self, responses: Sequence[FinishedResponse]) -> None:
        """Judge and store them soon; call it often, with or without responses."""
        self._waiting += responses
        is_time = time.monotonic() - self._started > _GATHER_SECONDS
        if self._waiting and self._last_batch.done() and is_time:
            self._start_batch()

    def _start_batch(self) -> Future[None]:
        """Start to judge what waits, after the last batch. Errors: those of the last batch."""
        self._last_batch.result()
        batch = self._waiting
        self._waiting = []
        self._started = time.monotonic()
        self._last_batch = self._thread.submit(self._judge, batch)
        return self._last_batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *unused: object) -> None:
        with self._thread:
            try:
                self._start_batch().result()
                self._store()
            except Exception:
                if kind is None:  # else the error of the `with` block is raised
                    raise

    def _judge(self, batch: Sequence[FinishedResponse]) -> None:
        """Judge a batch and store it; failures wait until the judge has given its first verdict.

        Errors: `UserError` if it has failed at all responses of this rank since the start; of these
        nothing is stored.
        """
        rollouts = [rollout for rollout, _ in batch]
        verdicts = self._verifier.score(rollouts, self._problems)
        judged = list(zip(batch, verdicts, strict=True))
        outcomes = [(one.problem_id, verdict.outcome) for (one, _), verdict in judged]
        if self._verifier.always_fails(outcomes, len(self._problems)):
            raise self._verifier.refusal(self._verifier.first_failure)
        self._judged += judged
        has_failures = any(verdict.outcome in FAILURES for _, verdict in self._judged)
        if self._verifier.has_judged or not has_failures:
            self._store()

    def _store(self) -> None:
        """Store the samples that are judged, then count them."""
        judged, self._judged = self._judged, []
        samples: defaultdict[str, list[StoredSample]] = defaultdict(list)
        num_correct = num_tokens = 0
        for (rollout, extra_tokens), verdict in judged:
            benchmark = rollout.problem_id.partition("/")[0]
            problem = self._problems[rollout.problem_id]
            sample = StoredSample(
                problem_id=problem.id,
                sample_index=rollout.sample_index,
                outcome=verdict.outcome,
                answer=verdict.answer,
                gold=problem.answer,
                finish_reason=rollout.finish_reason,
                num_tokens=len(rollout.response_ids),
                extra_tokens=extra_tokens,
                text=rollout.text,
                token_use=self._meter.measure(rollout, verdict),
                first_right_char=verdict.first_right_char,
            )
            samples[benchmark].append(sample)
            num_correct += sample.correct
            num_tokens += sample.num_tokens + extra_tokens
        for benchmark in samples:
            self._files.append(benchmark, samples[benchmark])
        # In the reverse order of `COUNTERS`.
        self._job.add(f"{self._name}/tokens", num_tokens)
        self._job.add(f"{self._name}/correct", num_correct)
        self._job.add(f"{self._name}/done", len(judged))
