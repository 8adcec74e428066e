"""The benchmarks of an evaluation: names, where their problems come from, samples of each."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_opsft.commands.evaluate.settings import EvalSettings
from megatron_opsft.commands.report.table import OVERALL
from megatron_opsft.data.problems import ARITHMETIC, ProblemSet, load_problems
from megatron_opsft.errors import UserError
from megatron_opsft.records import Problem

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

    @property
    def problem_ids(self) -> frozenset[str]:
        """The ids of `problems`."""
        return frozenset(problem.id for problem in self.problems)

    def key(self, problem_id: str) -> str:
        """The problem's name among all benchmarks; with its index it seeds a sample."""
        return f"{self.name}/{problem_id}"


def ordered(benchmarks: Iterable[str]) -> list[str]:
    """The paper's benchmarks in its order, then the others by name."""
    known = {name: place for place, name in enumerate(PAPER_ORDER)}
    return sorted(benchmarks, key=lambda name: (known.get(name, len(known)), name))


def load_benchmarks(
    settings: EvalSettings, *, is_tiny_reasoner: bool
) -> tuple[Benchmark, ...]:
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
