"""Verdicts beside the generation: a thread hands responses to the verifier and stores them."""

import threading
import time
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from megatron_opsft.evaluate.progress_line import Tally
from megatron_opsft.evaluate.samples import SampleFiles, StoredSample
from megatron_opsft.records import Outcome, Problem, Rollout, Verdict
from megatron_opsft.verify.verifier import Verifier

_Finished = tuple[Rollout, int]
_GATHER_SECONDS = 0.2  # every batch takes the interpreter from the engine's loop a few times


class Scorer:
    """Use it in a `with`: on the way out everything that was put in is judged and stored.

    A finished response is a rollout, whose problem_id is the problem's key, and the number of
    tokens it cost beyond its own. Engines hand it over and continue; judging waits for worker
    processes most of the time, so one thread is enough. An error in it is raised at the next `put`
    or at the end.
    """

    def __init__(
        self,
        verifier: Verifier,
        problems: Mapping[str, tuple[str, Problem]],
        files: SampleFiles,
        tally: Tally,
    ) -> None:
        """problems: key -> (benchmark, problem). tally: gets what was stored."""
        self._verifier, self._problems, self._files = verifier, problems, files
        self._tally = tally
        self._by_key = {key: problem for key, (_, problem) in problems.items()}
        self._queue: SimpleQueue[_Finished | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="scorer")

    def put(self, responses: Sequence[_Finished]) -> None:
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
                verdicts = self._verifier.score([rollout for rollout, _ in batch], self._by_key)
                self._store(batch, verdicts)
        except BaseException as error:  # handed to the thread that waits for this one
            self._error = error

    def _next(self) -> list[_Finished]:
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

    def _store(self, batch: Sequence[_Finished], verdicts: Sequence[Verdict]) -> None:
        rows: dict[str, list[StoredSample]] = {}
        for (rollout, extra_tokens), verdict in zip(batch, verdicts, strict=True):
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
                    extra_tokens=extra_tokens,
                    text=rollout.text,
                )
            )
        for benchmark, samples in rows.items():
            self._files.append(benchmark, samples)
        self._tally.add(
            samples=len(batch),
            correct=sum(verdict.outcome is Outcome.CORRECT for verdict in verdicts),
            tokens=sum(len(rollout.response_ids) + extra for rollout, extra in batch),
        )
