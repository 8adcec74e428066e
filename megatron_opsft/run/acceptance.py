"""Warnings of a run that accepts too little. Used by rank 0."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.report.lines import read_json_lines
from megatron_opsft.run.advice import (
    CorrectLengths,
    RecentAcceptance,
    explain_empty_step,
    measure_correct,
)

log = logging.getLogger("megatron_opsft")


class AcceptanceNotes:
    """Says the reason of the first step that accepts nothing, and what ten steps accepted."""

    def __init__(self, run_dir: Path, limit: int) -> None:
        """limit: rollout.max_response_tokens."""
        self._evaluations = run_dir / "evals.jsonl"
        self._limit = limit
        self._recent = RecentAcceptance()
        self._has_explained = False

    def note(self, metrics: Mapping[str, float | int]) -> None:
        """After each step, with its line of metrics.jsonl."""
        if not metrics["num_accepted"] and not self._has_explained:
            self._has_explained = True
            found = self._base_evaluation()
            explained = explain_empty_step(metrics, self._limit, _lengths_in(found), found)
            log.warning("%s", explained)
        if warning := self._recent.add(metrics):
            log.warning("%s", warning)

    def _base_evaluation(self) -> dict[str, Any]:
        """The first evaluation's line; {} where nothing is evaluated."""
        return next(iter(read_json_lines(self._evaluations)), {})


def _lengths_in(evaluation: Mapping[str, Any]) -> CorrectLengths | None:
    if "eval_correct_tokens_half" not in evaluation:
        return None
    tenth, half = (evaluation[f"eval_correct_tokens_{part}"] for part in ("tenth", "half"))
    return CorrectLengths(tenth=tenth, half=half)


def lengths_for_notes(correct_lengths: Sequence[int]) -> dict[str, int]:
    """What a line of evals.jsonl has of the lengths of correct answers.

    Nothing where no answer is correct.
    """
    measured = measure_correct(correct_lengths)
    if measured is None:
        return {}
    return {
        "eval_correct_tokens_tenth": measured.tenth,
        "eval_correct_tokens_half": measured.half,
    }
