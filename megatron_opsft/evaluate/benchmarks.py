"""The benchmarks: where their problems come from, and how many samples each problem gets."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_opsft.data.problems import ARITHMETIC, ProblemSet, load_problems
from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.results import PAPER_ORDER
from megatron_opsft.records import Problem
from megatron_opsft.report.table import OVERALL

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OWN_SAMPLES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBenchmark:
    """A data set of the Hugging Face hub, or `arithmetic`; `samples`: N by default."""

    path: str
    split: str
    samples: int
    subset: str | None = None


# N: the paper's evaluation settings.
KNOWN: dict[str, KnownBenchmark] = {
    "gsm8k": KnownBenchmark(path="openai/gsm8k", subset="main", split="test", samples=16),
    "math500": KnownBenchmark(path="HuggingFaceH4/MATH-500", split="test", samples=16),
    "amc23": KnownBenchmark(path="math-ai/amc23", split="test", samples=64),
    "aime24": KnownBenchmark(path="HuggingFaceH4/aime_2024", split="train", samples=64),
    "aime25": KnownBenchmark(path="math-ai/aime25", split="test", samples=64),
    ARITHMETIC: KnownBenchmark(path=ARITHMETIC, split="test", samples=4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Problems to answer, `samples` times each.

    data: all that was read, `problems` the part that is used. Ids of problems are those of the
    source; `key` makes them unique over benchmarks.
    """

    name: str
    data: ProblemSet
    problems: tuple[Problem, ...]
    samples: int

    def key(self, problem_id: str) -> str:
        """The problem's name among all benchmarks; with its index it seeds a sample."""
        return f"{self.name}/{problem_id}"


def choose_names(
    wanted: Sequence[str], data: Mapping[str, str], *, is_tiny_reasoner: bool
) -> tuple[str, ...]:
    """The benchmarks to run, each once. Errors: `UserError` for an unknown or unusable name."""
    chosen = tuple(dict.fromkeys(wanted or data))
    if not chosen:
        chosen = (ARITHMETIC,) if is_tiny_reasoner else PAPER_ORDER
    for name in (*chosen, *data):
        if not _NAME.fullmatch(name) or name == OVERALL:
            raise UserError(
                f"benchmark {name!r}: a name consists of letters, digits, '.', '_' and '-', and "
                f"is not {OVERALL!r}"
            )
    for name in chosen:
        if name not in data and name not in KNOWN:
            raise UserError(
                f"benchmark {name!r} is not known; there are {', '.join(KNOWN)}, or give your "
                f"own with --data {name}=FILE"
            )
    for name in data:
        if name not in chosen:
            raise UserError(
                f"--data {name}=...: {name} is not among the benchmarks {','.join(chosen)}; add it "
                "to --benchmarks"
            )
    return chosen


def load_benchmark(
    name: str,
    data: Mapping[str, str],
    *,
    samples: int | None,
    limit: int | None,
    problem_field: str | None = None,
    answer_field: str | None = None,
    template: str = "chat",
    with_fields: bool = False,
) -> Benchmark:
    """Read one benchmark. The fields are those of a file in `data`; None: the usual names.
    template, with_fields: as in `load_problems`.

    Errors: `UserError` naming the benchmark, what is wrong, and how to fix it.
    """
    is_file = name in data
    source = KNOWN.get(name, KnownBenchmark(path="", split="test", samples=_OWN_SAMPLES))
    if is_file:
        source = KnownBenchmark(path=data[name], split="test", samples=source.samples)
    try:
        loaded = load_problems(
            source.path,
            split=source.split,
            subset=source.subset,
            problem_field=problem_field if is_file else None,
            answer_field=answer_field if is_file else None,
            section="",
            template=template,
            with_fields=with_fields,
        )
    except UserError as error:
        fix = "" if is_file else f"; or give a local file: --data {name}=FILE"
        raise UserError(f"benchmark {name}: {error}{fix}") from None
    if loaded.bad_rows:
        first = min(loaded.bad_rows, key=lambda bad: bad.row)
        raise UserError(
            f"benchmark {name}: {first.source}:{first.row}: {first.reason} "
            f"({len(loaded.bad_rows)} such rows); a benchmark must be whole: fix the file"
        )
    return Benchmark(
        name=name,
        data=loaded,
        problems=tuple(loaded.problems[:limit]),
        samples=samples or source.samples,
    )
