"""Verdicts beside the generation: a thread hands responses to the verifier and stores them."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Self

from megatron_opsft.evaluate.benchmarks import Benchmark
from megatron_opsft.evaluate.samples import SampleFiles, StoredSample
from megatron_opsft.evaluate.work import Tally
from megatron_opsft.records import Outcome, Rollout
from megatron_opsft.verify.verifier import Verifier

_Finished = tuple[Rollout, int]
_GATHER_SECONDS = 0.2  # every batch takes the interpreter from the engine's loop a few times


class Scorer:
    """Use it in a `with`: on the way out everything that was put in is judged and stored.

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
        tally: Tally,
    ) -> None:
        """tally: gets what was stored."""
        self._verifier, self._files, self._tally = verifier, files, tally
        self._problems = {b.key(p.id): p for b in benchmarks for p in b.problems}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._waiting: list[_Finished] = []
        self._under_way: Future[None] | None = None
        self._begun = 0.0

    def put(self, responses: Sequence[_Finished]) -> None:
        """Judge and store them soon; call it often, with or without responses."""
        self._waiting += responses
        is_idle = self._under_way is None or self._under_way.done()
        if self._waiting and is_idle and time.monotonic() - self._begun > _GATHER_SECONDS:
            self._begin()

    def _begin(self) -> Future[None]:
        """Judge what waits, after the batch before. Errors: of that batch."""
        if self._under_way is not None:
            self._under_way.result()
        batch, self._waiting = self._waiting, []
        self._begun = time.monotonic()
        self._under_way = self._thread.submit(self._judge, batch)
        return self._under_way

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._thread, nullcontext() if error is None else suppress(Exception):
            self._begin().result()

    def _judge(self, batch: Sequence[_Finished]) -> None:
        verdicts = self._verifier.score([rollout for rollout, _ in batch], self._problems)
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
        self._tally.add(
            samples=len(batch),
            correct=sum(verdict.outcome is Outcome.CORRECT for verdict in verdicts),
            tokens=sum(len(rollout.response_ids) + extra for rollout, extra in batch),
        )
