"""Writes the responses of every step to files while the step goes on, and those of evaluations.

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
from megatron_opsft.records import (
    Problem,
    Response,
    Rollout,
    TokenScores,
    TokenUse,
    Verdict,
)
from megatron_opsft.run.start.run_directory import HELD_OUT
from megatron_opsft.run.step.batch import JudgedBatch
from megatron_opsft.run.step.judged_problems import JudgedProblems
from megatron_opsft.runtime.distributed import Layout, deal, max_over_world
from megatron_opsft.runtime.durable import rollout_name, write_packed_lines

Line = Mapping[str, Any]


class RolloutLog:
    """Writes the files of `rollouts/` and `held_out/`, if the run saves them. Every rank calls
    every method.
    """

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
                line = _line_of(
                    batch,
                    response,
                    reward=credit.reward,
                    advantage=credit.advantage,
                    scores=scores.get(response.rollout_index),
                )
                numbered_lines.append((number, line))
        self._submit("rollouts", step, numbered_lines)

    def write_held_out(self, step: int, judged: JudgedProblems, name: str = "") -> None:
        """Write the responses to a held-out set after `step` updates; return when the files of all
        nodes are on disk.

        name: the set of `eval.more`; "" for the first set. Collective over the world. Errors: those
        of writing the files.
        """
        if not self._config.save_rollouts:
            return
        numbered_lines = []
        for number, response in enumerate(judged.responses):
            if response.rank == self._rank:
                numbered_lines.append((number, _line_of(judged, response)))
        self._submit(f"{HELD_OUT}/{name}", step, numbered_lines)
        self.finish()
        max_over_world([0.0])  # wait until every rank is here

    def _submit(
        self, folder: str, step: int, numbered_lines: Sequence[tuple[int, Line]]
    ) -> None:
        """Start to write the node's lines to the step's file in a folder of the run's directory.

        numbered_lines: this rank's, each with its place among the lines of all ranks.
        """
        # The lines go to the node's writer; the other ranks get none.
        lines_of_node = deal({self._writer: numbered_lines})
        lines_of_node.sort(key=itemgetter(0))
        lines = [line for _, line in lines_of_node]
        if lines:
            name = f"{folder}/{rollout_name(step, self._file_rank)}"
            self._written = self._thread.submit(_write, self._config.dir, name, lines)

    def finish(self) -> None:
        """Wait until the responses are on disk. Errors: those of writing them."""
        if self._written is not None:
            self._written.result()

    def close(self) -> None:
        """Finish what is being written, and end the thread. Errors are those of `finish` alone."""
        self._thread.shutdown()


def _write(run_dir: Path, name: str, lines: Sequence[Line]) -> None:
    """Write the file `name` below the run's directory, which must exist."""
    below_run_dir = list(Path(name).parents)[:-1]  # without "."
    for folder in reversed(below_run_dir):
        # Somebody may have deleted it to make room.
        (run_dir / folder).mkdir(exist_ok=True)
    write_packed_lines(run_dir / name, lines, level=1)


def _line_of(judged: JudgedProblems, response: Response, **more: Any) -> Line:
    """Return the line of a response that this rank sampled. more: as of `rollout_line`."""
    index = response.rollout_index
    return rollout_line(
        judged.problems[response.problem_index],
        judged.rollouts[index],
        judged.verdicts[index],
        judged.token_uses[index],
        **more,
    )


def rollout_line(
    problem: Problem,
    rollout: Rollout,
    verdict: Verdict,
    token_use: TokenUse,
    *,
    reward: float | None = None,
    advantage: float | None = None,
    scores: TokenScores | None = None,
) -> Line:
    """Return a line of a file in `rollouts/`, by key; without a reward one of `held_out/`."""
    credit = {}
    if reward is not None:
        credit = {"reward": reward, "advantage": advantage}
    fields = {
        "problem_id": rollout.problem_id,
        "sample_index": rollout.sample_index,
        "problem": problem.text,
        "gold": problem.answer,
        "outcome": verdict.outcome.value,
        "answer": verdict.answer,
        **credit,
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
