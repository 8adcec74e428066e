"""Writes the responses of every step to files while the step goes on.

The last rank of every node writes the responses of the node's ranks. The same responses give the
same bytes; on one node, with any layout.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from megatron_opsft.config import RunConfig
from megatron_opsft.records import Problem, Rollout, TokenScores, TokenUse, Verdict
from megatron_opsft.run.step.batch import JudgedBatch
from megatron_opsft.runtime.distributed import Layout, deal
from megatron_opsft.runtime.durable import rollout_name, write_packed_lines

Line = Mapping[str, Any]


class RolloutLog:
    """Writes the files of `rollouts/`, if the run saves them. Every rank calls every method."""

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        self._config = config
        self._rank = layout.rank
        node_size = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size))
        first_of_node = layout.rank - int(os.environ.get("LOCAL_RANK", layout.rank))
        # One rank of each node writes, its last; rank 0 has other files to write.
        self._writer = min(first_of_node + node_size, layout.world_size) - 1
        # With several nodes every writer has a file of its own.
        self._file_rank = self._writer if node_size < layout.world_size else None
        self._thread = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None

    def begin(
        self, step: int, batch: JudgedBatch, scores: Mapping[int, TokenScores]
    ) -> None:
        """Start to write the responses of a batch; `finish` must follow.

        scores: log-probabilities of this rank's responses, by index into `batch.rollouts`; empty if
        they are not written. Collective over the world.
        """
        if not self._config.save_rollouts:
            return
        numbered_lines = []
        for number, credit in enumerate(chain.from_iterable(batch.credits)):
            response = credit.response
            if response.rank == self._rank:
                line = rollout_line(
                    batch.problems[response.problem_index],
                    batch.rollouts[response.rollout_index],
                    batch.verdicts[response.rollout_index],
                    batch.token_uses[response.rollout_index],
                    reward=credit.reward,
                    advantage=credit.advantage,
                    scores=scores.get(response.rollout_index),
                )
                numbered_lines.append((number, line))
        # The lines go to the node's writer; the other ranks get none.
        lines_of_node = deal({self._writer: numbered_lines})
        lines_of_node.sort(key=itemgetter(0))
        lines = [line for _, line in lines_of_node]
        if lines:
            name = rollout_name(step, self._file_rank)
            path = self._config.dir / "rollouts" / name
            self._written = self._thread.submit(_write, path, lines)

    def finish(self) -> None:
        """Wait until the responses of `begin` are on disk. Errors: those of writing them."""
        if self._written is not None:
            self._written.result()


def _write(path: Path, lines: Sequence[Line]) -> None:
    path.parent.mkdir(exist_ok=True)  # somebody may have deleted it to make room
    write_packed_lines(path, lines, level=1)


def rollout_line(
    problem: Problem,
    rollout: Rollout,
    verdict: Verdict,
    token_use: TokenUse,
    *,
    reward: float,
    advantage: float,
    scores: TokenScores | None = None,
) -> Line:
    """Return a line of a file in `rollouts/`, by key."""
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
        "token_use": token_use._asdict(),
        "first_right_char": verdict.first_right_char,
        "text": rollout.text,
        "response_ids": rollout.response_ids,
    }
    return fields if scores is None else fields | asdict(scores)
