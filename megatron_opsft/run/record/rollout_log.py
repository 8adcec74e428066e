"""Files with the responses of every step, written while the step goes on.

The last rank of every node writes those of the node's ranks. The same responses give the same
bytes; on one node, with any layout.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from megatron_opsft.records import Problem, Rollout, TokenScores, Verdict
from megatron_opsft.run.step.batch import JudgedBatch
from megatron_opsft.runtime.distributed import Layout, deal
from megatron_opsft.runtime.durable import rollout_name, write_packed_lines

Line = Mapping[str, Any]


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
        self._thread = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None

    def begin(
        self, step: int, batch: JudgedBatch, scores: Mapping[int, TokenScores]
    ) -> None:
        """`finish` must follow. Collective over the world. scores: of this rank's responses, by
        index, where they are to be written.
        """
        mine = [
            (
                number,
                rollout_line(
                    batch.problems[response.problem_index],
                    batch.rollouts[response.rollout_index],
                    batch.verdicts[response.rollout_index],
                    reward=batch.weights.rewards[number],
                    advantage=batch.weights.advantages[number],
                    scores=scores.get(response.rollout_index),
                ),
            )
            for number, response in enumerate(batch.responses)
            if response.rank == self._rank
        ]
        lines = [
            line for _, line in sorted(deal({self._writer: mine}), key=itemgetter(0))
        ]
        if lines:
            path = self._directory / rollout_name(step, self._in_name)
            self._written = self._thread.submit(_write, path, lines)

    def finish(self) -> None:
        """Wait until the responses of `begin` are on disk. Errors: why this rank cannot write."""
        if self._written is not None:
            self._written.result()


def _write(path: Path, lines: Sequence[Line]) -> None:
    path.parent.mkdir(exist_ok=True)  # somebody may have deleted it, to make room
    write_packed_lines(path, lines, level=1)


def rollout_line(
    problem: Problem,
    rollout: Rollout,
    verdict: Verdict,
    *,
    reward: float,
    advantage: float,
    scores: TokenScores | None = None,
) -> Line:
    """A line of a file in `rollouts/`, as JSON."""
    fields = {
        "problem_id": rollout.problem_id,
        "sample_index": rollout.sample_index,
        "problem": problem.text,
        "gold": problem.answer,
        "outcome": verdict.outcome.value,
        "answer": verdict.answer,
        "reward": reward,
        "advantage": advantage,
        "finish_reason": rollout.finish_reason.value,
        "num_prompt_tokens": len(rollout.prompt_ids),
        "num_tokens": len(rollout.response_ids),
        "weight_version": rollout.weight_version,
        "text": rollout.text,
        "response_ids": rollout.response_ids,
    }
    return fields if scores is None else fields | asdict(scores)
