"""The samples of an evaluation on disk, written one by one, so that a killed evaluation keeps them.

While an evaluation runs, each process appends to a file of its own, `samples/parts/BENCHMARK.*`;
a kill can tear the last line of each, which is then sampled again. When a benchmark is complete its
files become one, `samples/BENCHMARK.jsonl.gz`: sorted, the same bytes for the same samples.

The texts of the problems stand once beside them, in `problems.jsonl`; earlier releases wrote none.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

from megatron_opsft.errors import UserError, first_line
from megatron_opsft.records import (
    FinishReason,
    JsonObject,
    Outcome,
    Problem,
    Thinking,
    TokenUse,
    record,
)
from megatron_opsft.runtime.durable import json_lines, write_packed_lines, write_text
from megatron_opsft.runtime.journal import Journal

PROBLEMS = "problems.jsonl"


@record
class StoredSample:
    """One response to a problem of a benchmark, and its verdict."""

    problem_id: str
    sample_index: int
    outcome: Outcome
    answer: str
    """The answer that was read from the response."""
    gold: str
    finish_reason: FinishReason
    num_tokens: int
    """Tokens of the response, the end token included."""
    extra_tokens: int
    """Tokens that were sampled for it beyond the response."""
    text: str
    token_use: TokenUse | None = None
    """Where its tokens went; None in evaluations of earlier versions."""
    first_right_char: int | None = None
    """Characters of `text` up to the end of the first right answer; None if none was found."""

    @property
    def correct(self) -> bool:
        """True if the verifier says so."""
        return self.outcome is Outcome.CORRECT

    @property
    def finished(self) -> bool:
        """True if it ended by an end token, not by the token limit."""
        return self.finish_reason is FinishReason.STOP

    @property
    def has_answer(self) -> bool:
        """True if an answer could be read from it, right or wrong."""
        return self.outcome not in (Outcome.NO_ANSWER, Outcome.UNFINISHED)


def _row(sample: StoredSample) -> JsonObject:
    """Return the line of a sample, by key."""
    row = asdict(sample)
    row["token_use"] = sample.token_use and sample.token_use._asdict()
    return row


def _sample_of(row: JsonObject) -> StoredSample:
    """Return the sample of a line. Errors: `KeyError`, `TypeError`, `ValueError` if it is none."""
    use = row.get("token_use")
    if use is not None:
        use = TokenUse(**{**use, "thinking": Thinking(use["thinking"])})
    return StoredSample(
        **{
            **row,
            "outcome": Outcome(row["outcome"]),
            "finish_reason": FinishReason(row["finish_reason"]),
            "token_use": use,
        }
    )


class SampleFiles:
    """The samples of one model below `directory`. Any number of processes may append at once."""

    def __init__(self, directory: Path) -> None:
        self._problems = directory / PROBLEMS
        self._directory = directory / "samples"
        self._unfinished = self._directory / "parts"
        self._process_name = uuid4().hex

    def append(self, benchmark: str, samples: Sequence[StoredSample]) -> None:
        """Append to this process's own file, in one write: a kill of the process loses nothing."""
        self._unfinished.mkdir(parents=True, exist_ok=True)
        path = self._unfinished / f"{benchmark}.{self._process_name}.jsonl"
        Journal(path).append(*map(_row, samples))

    def add_problems(self, benchmark: str, problems: Sequence[Problem]) -> None:
        """Write the texts of a benchmark's problems beside those that are there. Called by one
        process alone.
        """
        texts = self.problems()
        texts |= {(benchmark, problem.id): problem.text for problem in problems}
        lines = [
            json.dumps(
                {"benchmark": name, "problem_id": problem_id, "problem": text},
                ensure_ascii=False,
            )
            for (name, problem_id), text in texts.items()
        ]
        write_text(self._problems, "".join(f"{line}\n" for line in lines))

    def problems(self) -> dict[tuple[str, str], str]:
        """Read (benchmark, problem) -> text of the problem; {} of an evaluation of an earlier
        release. Errors: `UserError` for a line that is no problem.
        """
        texts = {}
        for row in json_lines(self._problems):
            try:
                texts[row["benchmark"], row["problem_id"]] = row["problem"]
            except KeyError as error:
                raise UserError(
                    f"{self._problems}: a line has no {error}; delete the file, and evaluate again"
                ) from None
        return texts

    def complete(self) -> list[str]:
        """Return the names of the benchmarks whose samples are complete: their file is compressed
        when the last one is there.
        """
        return sorted(
            path.name.removesuffix(".jsonl.gz")
            for path in self._directory.glob("*.jsonl.gz")
        )

    def read(self, benchmark: str) -> list[StoredSample]:
        """Read all samples, sorted by problem and index; of two with equal ones the first counts.

        Errors: `UserError` for a line that is no sample.
        """
        samples: dict[tuple[str, int], StoredSample] = {}
        for path in (
            self._complete_file(benchmark),
            *self._unfinished_files(benchmark),
        ):
            for row in json_lines(path):
                try:
                    sample = _sample_of(row)
                except (KeyError, TypeError, ValueError) as error:
                    raise UserError(
                        f"{path}: a line is no sample ({first_line(error)}); delete the line"
                    ) from None
                samples.setdefault((sample.problem_id, sample.sample_index), sample)
        return [samples[key] for key in sorted(samples)]

    def read_first(
        self, benchmark: str, problem_ids: Collection[str], num_samples: int
    ) -> list[StoredSample]:
        """Read the samples of these problems with an index below `num_samples`, in `read`'s order.
        Samples that do not exist are missing in the result.
        """
        return [
            sample
            for sample in self.read(benchmark)
            if sample.problem_id in problem_ids and sample.sample_index < num_samples
        ]

    def combine(self, benchmark: str) -> None:
        """Make the files of all processes one; a kill meanwhile leaves old files, new or both."""
        unfinished = self._unfinished_files(benchmark)
        if not unfinished:
            return
        rows = map(_row, self.read(benchmark))
        write_packed_lines(self._complete_file(benchmark), rows, level=6)
        for path in unfinished:
            path.unlink()
        if not any(self._unfinished.iterdir()):
            self._unfinished.rmdir()

    def _complete_file(self, benchmark: str) -> Path:
        return self._directory / f"{benchmark}.jsonl.gz"

    def _unfinished_files(self, benchmark: str) -> list[Path]:
        # A benchmark's name may have dots, and be the beginning of another's.
        files = sorted(self._unfinished.glob("*.jsonl"))
        return [path for path in files if path.name.rsplit(".", 2)[0] == benchmark]
