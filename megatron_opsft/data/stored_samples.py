"""The samples of an evaluation, one by one on disk: what a killed evaluation does not lose.

While an evaluation runs, each process appends to a file of its own, `samples/parts/BENCHMARK.*`;
a kill can tear the last line of each, which is then sampled again. When a benchmark is complete its
parts become one file, `samples/BENCHMARK.jsonl.gz`: sorted, the same bytes for the same samples.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from megatron_opsft.errors import UserError, first_line
from megatron_opsft.records import FinishReason, Outcome
from megatron_opsft.runtime.durable import append_line, json_lines, write_packed_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """One response and its verdict. problem_id: of the benchmark's own. answer: what was read from
    the response, gold: what was expected. num_tokens: end token included; extra_tokens: sampled
    for it beyond the response.
    """

    problem_id: str
    sample_index: int
    outcome: Outcome
    answer: str
    gold: str
    finish_reason: FinishReason
    num_tokens: int
    extra_tokens: int
    text: str

    @property
    def correct(self) -> bool:
        """Whether the verifier says so."""
        return self.outcome is Outcome.CORRECT

    @property
    def finished(self) -> bool:
        """By its own end token, not by the token limit."""
        return self.finish_reason is FinishReason.STOP

    @property
    def has_answer(self) -> bool:
        """Whether an answer could be read from it, right or wrong."""
        return self.outcome not in (Outcome.NO_ANSWER, Outcome.UNFINISHED)


class SampleFiles:
    """The samples of one model below `directory`. Any number of processes may append at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "samples"
        self._parts = self._directory / "parts"
        self._name = uuid4().hex

    def append(self, benchmark: str, samples: Sequence[StoredSample]) -> None:
        """One write to this process's own file: a kill of the process loses none of it."""
        self._parts.mkdir(parents=True, exist_ok=True)
        path = self._parts / f"{benchmark}.{self._name}.jsonl"
        lines = [json.dumps(asdict(sample), ensure_ascii=False) for sample in samples]
        append_line(path, "\n".join(lines))

    def complete(self) -> list[str]:
        """The names of the benchmarks whose samples are all there."""
        return sorted(
            path.name.removesuffix(".jsonl.gz")
            for path in self._directory.glob("*.jsonl.gz")
        )

    def read(self, benchmark: str) -> list[StoredSample]:
        """All samples, by problem and index; one that is there twice counts once."""
        found: dict[tuple[str, int], StoredSample] = {}
        for path in self._files(benchmark):
            for row in json_lines(path):
                try:
                    row["outcome"] = Outcome(row["outcome"])
                    row["finish_reason"] = FinishReason(row["finish_reason"])
                    sample = StoredSample(**row)
                except (KeyError, TypeError, ValueError) as error:
                    raise UserError(
                        f"{path}: a line is no sample ({first_line(error)}); delete the line"
                    ) from None
                found.setdefault((sample.problem_id, sample.sample_index), sample)
        return [found[key] for key in sorted(found)]

    def read_first(
        self, benchmark: str, problem_ids: Collection[str], each: int
    ) -> list[StoredSample]:
        """Read the samples with an index below `each` of these problems, as far as they are there.

        The order is that of `read`.
        """
        return [
            sample
            for sample in self.read(benchmark)
            if sample.problem_id in problem_ids and sample.sample_index < each
        ]

    def combine(self, benchmark: str) -> None:
        """Make the parts one file; a kill in between leaves parts or file, or both."""
        parts = [path for path in self._files(benchmark) if path.parent == self._parts]
        if not parts:
            return
        rows = map(asdict, self.read(benchmark))
        write_packed_lines(self._directory / f"{benchmark}.jsonl.gz", rows, level=6)
        for path in parts:
            path.unlink()
        if not any(self._parts.iterdir()):
            self._parts.rmdir()

    def _files(self, benchmark: str) -> list[Path]:
        whole = self._directory / f"{benchmark}.jsonl.gz"
        # A benchmark's name may be the beginning of another's: the rest has no further dot.
        parts = [
            p
            for p in self._parts.glob("*.jsonl")
            if p.name.rsplit(".", 2)[0] == benchmark
        ]
        return [*([whole] if whole.exists() else []), *sorted(parts)]
