"""Every response of an evaluation on disk, one by one: what a killed run does not lose.

While an evaluation runs, each process appends to a file of its own, `samples/parts/BENCHMARK.*`;
a kill can tear the last line of each, which is then sampled again. When a benchmark is complete its
parts become one file, `samples/BENCHMARK.jsonl.gz`: sorted, the same bytes for the same samples.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.benchmarks import Benchmark
from megatron_opsft.records import FinishReason, Outcome
from megatron_opsft.runtime.durable import append_line, whole_lines, write_packed_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """One response and its verdict.

    problem_id: of the benchmark's own. answer: what was read from the response, gold: what was to
    be found. num_tokens: of the response, end token included.
    extra_tokens: sampled for it beyond the response, by methods that do.
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

    def read(self, benchmark: str) -> list[StoredSample]:
        """All samples, by problem and index; one that is there twice counts once."""
        found: dict[tuple[str, int], StoredSample] = {}
        for path in self._files(benchmark):
            for sample in _read(path):
                found.setdefault((sample.problem_id, sample.sample_index), sample)
        return [found[key] for key in sorted(found)]

    def wanted(self, benchmark: Benchmark, each: int) -> list[StoredSample]:
        """The first `each` samples of the problems that the benchmark uses, as far as they are
        there, as `read` orders them.
        """
        ids = {problem.id for problem in benchmark.problems}
        return [
            sample
            for sample in self.read(benchmark.name)
            if sample.problem_id in ids and sample.sample_index < each
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
        parts = [p for p in self._parts.glob("*.jsonl") if p.name.rsplit(".", 2)[0] == benchmark]
        return [*([whole] if whole.exists() else []), *sorted(parts)]


def _read(path: Path) -> Iterator[StoredSample]:
    """Samples of a part, or of a combined file."""
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            row = json.loads(line)
            row["outcome"] = Outcome(row["outcome"])
            row["finish_reason"] = FinishReason(row["finish_reason"])
            yield StoredSample(**row)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path}:{number}: not a sample ({error})") from None
