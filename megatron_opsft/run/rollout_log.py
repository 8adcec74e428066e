"""The responses of every step in files, written while the step goes on.

The last rank of every node writes those of the node's ranks. The same responses give the same
bytes, on one node whatever the layout.
"""

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from megatron_opsft.records import ResponseFacts, Rollout, Verdict
from megatron_opsft.runtime.distributed import Layout, deal
from megatron_opsft.runtime.durable import write_bytes
from megatron_opsft.runtime.step_names import rollout_name


class RolloutLog:
    """Writes `rollouts/`; every rank calls every method."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        self._rank = layout.rank
        # Not the first rank of the node: what is routed goes to higher ranks on the shortest way.
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size))
        node_start = layout.rank - int(os.environ.get("LOCAL_RANK", layout.rank))
        self._writer = min(node_start + local_size, layout.world_size) - 1
        self._in_name = self._writer if local_size < layout.world_size else None
        self._directory = directory
        self._thread: Thread | None = None
        self._failure: Exception | None = None

    def begin(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        verdicts: Sequence[Verdict],
        responses: Sequence[ResponseFacts],
    ) -> None:
        """rollouts, verdicts: this rank's; responses: facts of all ranks', in the step's order.

        `finish` must follow. Collective over the world.
        """
        mine = [
            (number, rollouts[response.index], verdicts[response.index])
            for number, response in enumerate(responses)
            if response.rank == self._rank
        ]
        rows = sorted(deal({self._writer: mine}), key=lambda row: row[0])
        if rows:
            path = self._directory / rollout_name(step, self._in_name)
            self._thread = Thread(target=self._write, args=(path, rows))
            self._thread.start()

    def _write(self, path: Path, rows: Sequence[tuple[int, Rollout, Verdict]]) -> None:
        try:
            write_rollouts(path, [(rollout, verdict) for _, rollout, verdict in rows])
        except Exception as error:  # for the thread that waits
            self._failure = error

    def finish(self) -> None:
        """Return when what was begun is on disk. Errors: what kept this rank's from it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure


def write_rollouts(path: Path, pairs: Sequence[tuple[Rollout, Verdict]]) -> None:
    """One response a line, whole or not at all; the same responses give the same bytes."""
    lines = (json.dumps(_row(*pair), ensure_ascii=False) + "\n" for pair in pairs)
    data = "".join(lines).encode("utf-8")
    write_bytes(path, gzip.compress(data, compresslevel=1, mtime=0))


def _row(rollout: Rollout, verdict: Verdict) -> dict[str, Any]:
    return {
        "problem_id": rollout.problem_id,
        "sample_index": rollout.sample_index,
        "outcome": verdict.outcome.value,
        "answer": verdict.answer,
        "finish_reason": rollout.finish_reason.value,
        "num_prompt_tokens": len(rollout.prompt_ids),
        "num_tokens": len(rollout.response_ids),
        "weight_version": rollout.weight_version,
        "text": rollout.text,
        "response_ids": rollout.response_ids,
    }
