"""Verdicts beside the generation: a thread hands responses to the verifier and stores them."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from megatron_opsft.evaluate.progress import Counted
from megatron_opsft.evaluate.samples import SampleFiles, StoredSample
from megatron_opsft.records import Outcome, Problem, Rollout, Verdict
from megatron_opsft.runtime.job import Job
from megatron_opsft.verify.verifier import Verifier

_GATHER_SECONDS = 0.2  # every batch takes the interpreter from the engine's loop a few times


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A rollout, whose problem_id is the problem's key, and what it cost beyond its tokens."""

    rollout: Rollout
    extra_tokens: int = 0


class Scorer:
    """Use it in a `with`: on the way out everything that was put in is judged and stored.

    Engines hand over what is finished and go on; judging waits for worker processes most of the
    time, so one thread is enough. An error in it is raised at the next `put` or at the end.
    """

    def __init__(
        self,
        verifier: Verifier,
        problems: Mapping[str, tuple[str, Problem]],
        files: SampleFiles,
        counted: Counted,
        job: Job,
    ) -> None:
        """problems: key -> (benchmark, problem). counted: which shared counters to raise."""
        self._verifier, self._problems, self._files = verifier, problems, files
        self._counted, self._job = counted, job
        self._gold = {key: problem.answer for key, (_, problem) in problems.items()}
        self._queue: SimpleQueue[Response | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="scorer")

    def put(self, responses: Sequence[Response]) -> None:
        """Judge and store them soon."""
        if self._error is not None:
            raise self._error
        for response in responses:
            self._queue.put(response)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._queue.put(None)
        self._thread.join()
        self._files.close()
        if self._error is not None and error is None:
            raise self._error

    def _work(self) -> None:
        try:
            while batch := self._next():
                verdicts = self._verifier.score([r.rollout for r in batch], self._gold)
                self._store(batch, verdicts)
        except BaseException as error:  # handed to the thread that waits for this one
            self._error = error

    def _next(self) -> list[Response]:
        """Everything that comes within a moment of the first; empty at the end."""
        batch = []
        response = self._queue.get()
        due = time.monotonic() + _GATHER_SECONDS
        while response is not None:
            batch.append(response)
            try:
                response = self._queue.get(timeout=max(due - time.monotonic(), 0))
            except Empty:
                return batch
        if batch:
            self._queue.put(None)  # the end, for the next call
        return batch

    def _store(self, batch: Sequence[Response], verdicts: Sequence[Verdict]) -> None:
        rows: dict[str, list[StoredSample]] = {}
        for response, verdict in zip(batch, verdicts, strict=True):
            rollout = response.rollout
            benchmark, problem = self._problems[rollout.problem_id]
            rows.setdefault(benchmark, []).append(
                StoredSample(
                    problem_id=problem.id,
                    sample_index=rollout.sample_index,
                    outcome=verdict.outcome,
                    answer=verdict.answer,
                    gold=problem.answer,
                    finish_reason=rollout.finish_reason,
                    num_tokens=len(rollout.response_ids),
                    extra_tokens=response.extra_tokens,
                    text=rollout.text,
                )
            )
        for benchmark, samples in rows.items():
            self._files.append(benchmark, samples)
        self._job.add(self._counted.correct, sum(v.outcome is Outcome.CORRECT for v in verdicts))
        tokens = sum(len(r.rollout.response_ids) + r.extra_tokens for r in batch)
        self._job.add(self._counted.tokens, tokens)
        self._job.add(self._counted.samples, len(batch))
