"""The benchmarks: where their problems come from, and the samples of them, one by one on disk: what
a killed evaluation does not lose.

While an evaluation runs, each process appends to a file of its own, `samples/parts/BENCHMARK.*`;
a kill can tear the last line of each, which is then sampled again. When a benchmark is complete its
parts become one file, `samples/BENCHMARK.jsonl.gz`: sorted, the same bytes for the same samples.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from megatron_opsft.data.problems import ARITHMETIC, ProblemSet, load_problems
from megatron_opsft.errors import UserError, first_line
from megatron_opsft.evaluate.settings import EvalSettings
from megatron_opsft.records import FinishReason, Outcome, Problem
from megatron_opsft.report.table import OVERALL
from megatron_opsft.runtime.durable import append_line, json_lines, write_packed_lines

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class _Source(NamedTuple):
    """A data set of the Hugging Face hub, `arithmetic`, or a file; samples: N by default."""

    path: str
    samples: int
    split: str = "test"
    subset: str | None = None


# N: the paper's evaluation settings.
KNOWN = {
    "gsm8k": _Source("openai/gsm8k", 16, subset="main"),
    "math500": _Source("HuggingFaceH4/MATH-500", 16),
    "amc23": _Source("math-ai/amc23", 64),
    "aime24": _Source("HuggingFaceH4/aime_2024", 64, split="train"),
    "aime25": _Source("math-ai/aime25", 64),
    ARITHMETIC: _Source(ARITHMETIC, 4),
}
PAPER_ORDER = tuple(KNOWN)[:5]
_OWN_SAMPLES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Problems to answer, `samples` times each. data: all that was read, `problems` the part that
    is used, with the source's ids.
    """

    name: str
    data: ProblemSet
    problems: tuple[Problem, ...]
    samples: int

    def key(self, problem_id: str) -> str:
        """The problem's name among all benchmarks; with its index it seeds a sample."""
        return f"{self.name}/{problem_id}"


def ordered(benchmarks: Iterable[str]) -> list[str]:
    """The paper's benchmarks in its order, then the others by name."""
    known = {name: place for place, name in enumerate(PAPER_ORDER)}
    return sorted(benchmarks, key=lambda name: (known.get(name, len(known)), name))


def load_benchmarks(settings: EvalSettings, *, is_tiny_reasoner: bool) -> tuple[Benchmark, ...]:
    """Those of the settings, read, each once; by default the paper's, or arithmetic for the tiny
    reasoner. Errors: `UserError` naming the benchmark, what is wrong, and how to fix it.
    """
    names = tuple(dict.fromkeys(settings.benchmarks or settings.data))
    if not names:
        names = (ARITHMETIC,) if is_tiny_reasoner else PAPER_ORDER
    for name in (*names, *settings.data):
        if not _NAME.fullmatch(name) or name == OVERALL:
            raise UserError(
                f"benchmark {name!r}: a name consists of letters, digits, '.', '_' and '-', and "
                f"is not {OVERALL!r}"
            )
        if name not in settings.data and name not in KNOWN:
            raise UserError(
                f"benchmark {name!r} is unknown; choose from {', '.join(KNOWN)}, or give your "
                f"own with --data {name}=FILE"
            )
        if name not in names:
            raise UserError(
                f"--data {name}=...: {name} is not among the benchmarks {','.join(names)}; add it "
                "to --benchmarks"
            )
    return tuple(_load(name, settings) for name in names)


def _load(name: str, settings: EvalSettings) -> Benchmark:
    file = settings.data.get(name)
    source = KNOWN.get(name, _Source("", _OWN_SAMPLES))
    if file is not None:
        source = _Source(file, source.samples)
    try:
        loaded = load_problems(
            source.path,
            split=source.split,
            subset=source.subset,
            problem_field=settings.problem_field if file else None,
            answer_field=settings.answer_field if file else None,
            section="",
            template=settings.template,
            with_fields=settings.verify.own_judge,
        )
    except UserError as error:
        fix = "" if file else f"; or give a local file: --data {name}=FILE"
        raise UserError(f"benchmark {name}: {error}{fix}") from None
    if loaded.bad_rows:
        first = min(loaded.bad_rows, key=lambda bad: bad.row)
        raise UserError(
            f"benchmark {name}: {first.source}:{first.row}: {first.reason} "
            f"({len(loaded.bad_rows)} such rows); a benchmark must be whole: fix the file"
        )
    samples = 1 if settings.temperature == 0 else settings.samples or source.samples
    problems = tuple(loaded.problems[: settings.limit])
    return Benchmark(name=name, data=loaded, problems=problems, samples=samples)


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
            path.name.removesuffix(".jsonl.gz") for path in self._directory.glob("*.jsonl.gz")
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
