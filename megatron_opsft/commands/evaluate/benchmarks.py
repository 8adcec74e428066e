"""The benchmarks of an evaluation: their names, and where their problems come from."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from megatron_opsft.commands.evaluate.settings import EvalSettings
from megatron_opsft.commands.report.table import OVERALL
from megatron_opsft.data.problems import ARITHMETIC, ProblemSet, load_problems
from megatron_opsft.data.stored_samples import SampleFiles, StoredSample
from megatron_opsft.errors import UserError
from megatron_opsft.records import Problem, record

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class _Source(NamedTuple):
    """The source of a benchmark's problems."""

    path: str
    """A data set of the Hugging Face hub, `arithmetic`, or a file."""
    samples: int
    """Responses to each problem, unless the user sets a number."""
    split: str = "test"
    subset: str | None = None


# Numbers of samples: the paper's evaluation settings.
KNOWN = {
    "gsm8k": _Source("openai/gsm8k", 16, subset="main"),
    "math500": _Source("HuggingFaceH4/MATH-500", 16),
    "amc23": _Source("math-ai/amc23", 64),
    "aime24": _Source("HuggingFaceH4/aime_2024", 64, split="train"),
    "aime25": _Source("math-ai/aime25", 64),
    ARITHMETIC: _Source(ARITHMETIC, 4),
}
PAPER_ORDER = tuple(KNOWN)[:5]
_SAMPLES_OF_A_FILE = 16


@record
class Benchmark:
    """Problems to answer, `samples` times each."""

    name: str
    data: ProblemSet
    """Everything that was read from the source."""
    problems: tuple[Problem, ...]
    """The problems of `data` that are used, with the source's ids."""
    samples: int

    def key(self, problem_id: str) -> str:
        """Return the problem's name among all benchmarks; with its index it seeds a sample."""
        return f"{self.name}/{problem_id}"

    def problems_by_key(self) -> dict[str, Problem]:
        """Return key -> problem."""
        return {self.key(problem.id): problem for problem in self.problems}

    def read_samples(self, evaluation: Path, num_samples: int) -> list[StoredSample]:
        """Read the stored samples of these problems that have an index below `num_samples`."""
        ids = {problem.id for problem in self.problems}
        return SampleFiles(evaluation).read_first(self.name, ids, num_samples)


def ordered(benchmarks: Collection[str]) -> list[str]:
    """Return the paper's benchmarks in its order, then the others by name."""
    of_paper = [name for name in PAPER_ORDER if name in benchmarks]
    return of_paper + sorted(set(benchmarks).difference(of_paper))


def load_benchmarks(
    settings: EvalSettings, *, is_tiny_reasoner: bool
) -> tuple[Benchmark, ...]:
    """Read the benchmarks of the settings, each once; by default the paper's, or arithmetic for
    the tiny reasoner.

    Errors: `UserError` naming the benchmark, what is wrong, and how to fix it.
    """
    wanted = settings.benchmarks or tuple(settings.data)
    if not wanted:
        wanted = (ARITHMETIC,) if is_tiny_reasoner else PAPER_ORDER
    names = tuple(dict.fromkeys(wanted))
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


def _source_of(name: str, settings: EvalSettings) -> _Source:
    """Return the user's file if there is one for the benchmark, else the known source."""
    file = settings.data.get(name)
    if file is None:
        return KNOWN[name]
    samples = KNOWN[name].samples if name in KNOWN else _SAMPLES_OF_A_FILE
    return _Source(file, samples)


def _load(name: str, settings: EvalSettings) -> Benchmark:
    """Read the problems of a benchmark. Errors: `UserError`, also if a single row is bad."""
    source = _source_of(name, settings)
    is_file = name in settings.data
    try:
        data = load_problems(
            source.path,
            split=source.split,
            subset=source.subset,
            problem_field=settings.problem_field if is_file else None,
            answer_field=settings.answer_field if is_file else None,
            section="",
            template=settings.template,
            with_fields=settings.verify.own_judge,
        )
    except UserError as error:
        fix = "" if is_file else f"; or give a local file: --data {name}=FILE"
        raise UserError(f"benchmark {name}: {error}{fix}") from None
    if data.bad_rows:
        first = min(data.bad_rows, key=lambda bad_row: bad_row.row)
        raise UserError(
            f"benchmark {name}: {first.place}: {first.reason} "
            f"({len(data.bad_rows)} such rows); a benchmark must be whole: fix the file"
        )
    samples = settings.samples or source.samples
    if settings.temperature == 0:
        samples = 1  # all samples would be the same
    return Benchmark(
        name=name,
        data=data,
        problems=tuple(data.problems[: settings.limit]),
        samples=samples,
    )
