"""Reads problems from the embedded task, JSONL, Parquet, a saved data set or a Hugging Face data
set.

A row that cannot be used is never dropped silently: it becomes a `BadRow` with its place and the
reason. A source without a single usable row is a `UserError`.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from megatron_opsft.config import DataConfig, EvalConfig
from megatron_opsft.data.prompt_file import PromptFile, open_prompt_file
from megatron_opsft.data.rows import ANSWER_FIELDS, PROBLEM_FIELDS, RowReader, choose_field
from megatron_opsft.data.sources import has_split, read_rows
from megatron_opsft.errors import PromptError, RowError, UserError
from megatron_opsft.records import Problem

ARITHMETIC = "arithmetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row left out: `row` counts from 1 (of a JSONL file it is the line)."""

    source: str
    row: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """What was read from one source.

    rows: the row number of each problem; sha256: of the ids, texts, answers and fields in order, so
    that a resumed run can tell whether its data changed. sources, parts: of a mixture the names of
    what it was read from, and which of them each problem is from.
    """

    name: str
    problems: Sequence[Problem]
    rows: tuple[int, ...]
    bad_rows: tuple[BadRow, ...]
    sha256: str
    sources: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()

    def source_of(self, index: int) -> str:
        """What a problem was read from."""
        return self.sources[self.parts[index]] if self.parts else self.name

    def pick(self, indices: Sequence[int], *, sha256: str) -> "ProblemSet":
        """Some of the problems, with all bad rows."""
        return replace(
            self,
            problems=tuple(self.problems[index] for index in indices),
            rows=tuple(self.rows[index] for index in indices),
            parts=tuple(self.parts[index] for index in indices) if self.parts else (),
            sha256=sha256,
        )


def load_problems(
    source: str,
    *,
    split: str = "train",
    subset: str | None = None,
    problem_field: str | None = None,
    answer_field: str | None = None,
    section: str = "data.",
    template: str = "chat",
    with_fields: bool = False,
) -> ProblemSet:
    """Read all problems of a source: `arithmetic`, a file, a saved data set, or a Hugging Face
    name.

    `split` and `subset` matter to data sets only (and `split` to `arithmetic`). A field that is
    None is found: the most common of PROBLEM_FIELDS and of ANSWER_FIELDS. section: what
    stands before a key's name in errors. template: a Jinja file makes the problems' texts, another
    one changes nothing here. with_fields: problems have the other columns of their
    rows. Raises UserError when the source cannot be read, has no such field, or no usable row.
    """
    if source == ARITHMETIC:
        return _load_arithmetic(split, open_prompt_file(template))
    prompt_file = open_prompt_file(template)
    rows = read_rows(source, split=split, subset=subset, section=section)
    reader = RowReader(
        stem=Path(source).name.split(".")[0],
        problem_field=choose_field(
            source, rows, problem_field, PROBLEM_FIELDS, f"{section}problem_field"
        ),
        answer_field=choose_field(
            source, rows, answer_field, ANSWER_FIELDS, f"{section}answer_field"
        ),
        prompt_file=prompt_file,
        with_fields=with_fields,
    )
    problems: list[Problem] = []
    numbers: list[int] = []
    bad_rows: list[BadRow] = []
    for row in rows:
        try:
            problems.append(reader.read(row))
            numbers.append(row.number)
        except RowError as error:
            bad_rows.append(BadRow(source=source, row=row.number, reason=str(error)))
    return make_set(source, problems, numbers, bad_rows)


def load_held_out(
    data: DataConfig, evaluation: EvalConfig, *, with_fields: bool = False
) -> ProblemSet | None:
    """Problems for evaluation: eval.data where it is set, else the test split of data.train, if
    that is one source, read with what `data` says of its subset and fields.

    None when neither exists. Errors: UserError as of `load_problems`, and for keys of `eval` that
    are set though there is nothing to read with them.
    """
    split = evaluation.split or "test"
    if evaluation.data is not None:
        return load_problems(
            evaluation.data,
            split=split,
            subset=evaluation.subset,
            problem_field=evaluation.problem_field,
            answer_field=evaluation.answer_field,
            section="eval.",
            template=data.template,
            with_fields=with_fields,
        )
    subset, train = evaluation.subset or data.subset, data.train
    if not isinstance(train, str) or (
        train != ARITHMETIC and not has_split(train, split, subset, section="eval.")
    ):
        keys = ("split", "subset", "problem_field", "answer_field")
        unused = [key for key in keys if getattr(evaluation, key) is not None]
        if unused:
            raise UserError(
                f"eval.{unused[0]}={getattr(evaluation, unused[0])}: {data.name} has no split "
                f"{split!r} to evaluate on; set eval.data, or name a split it has as eval.split"
            )
        return None
    return load_problems(
        train,
        split=split,
        subset=subset,
        problem_field=evaluation.problem_field or data.problem_field,
        answer_field=evaluation.answer_field or data.answer_field,
        section="eval.",
        template=data.template,
        with_fields=with_fields,
    )


def drop_unusable_prompts(
    problem_set: ProblemSet, encode: Callable[[Problem], Sequence[int]], max_prompt_tokens: int
) -> ProblemSet:
    """Move to the bad rows the problems whose encoded prompt is longer than the limit, and those
    that `encode` refuses.
    """
    kept: list[int] = []
    bad_rows = list(problem_set.bad_rows)
    for index, problem in enumerate(problem_set.problems):
        try:
            num_tokens = len(encode(problem))
            reason = (
                f"prompt of {num_tokens} tokens, more than data.max_prompt_tokens="
                f"{max_prompt_tokens}"
            )
        except PromptError as error:
            num_tokens, reason = max_prompt_tokens + 1, str(error)
        if num_tokens <= max_prompt_tokens:
            kept.append(index)
        else:
            source, row = problem_set.source_of(index), problem_set.rows[index]
            bad_rows.append(BadRow(source=source, row=row, reason=reason))
    return make_set(
        problem_set.name,
        (problem_set.problems[index] for index in kept),
        (problem_set.rows[index] for index in kept),
        bad_rows,
        sources=problem_set.sources,
        parts=tuple(problem_set.parts[index] for index in kept) if problem_set.parts else (),
    )


def describe_bad_rows(problem_set: ProblemSet, limit: int = 5) -> str:
    """For the user: how many rows were left out, the first of them, how many more; "" if none."""
    bad_rows = sorted(problem_set.bad_rows, key=lambda bad: bad.row)
    if not bad_rows:
        return ""
    num_rows = len(problem_set.problems) + len(bad_rows)
    lines = [f"{problem_set.name}: {len(bad_rows)} of {num_rows} rows left out"]
    lines += [f"  {bad.source}:{bad.row}: {bad.reason}" for bad in bad_rows[:limit]]
    if len(bad_rows) > limit:
        lines.append(f"  ... and {len(bad_rows) - limit} more")
    return "\n".join(lines)


def shuffled_subset(problems: Sequence[Problem], num: int, seed: int) -> tuple[Problem, ...]:
    """The first `num` problems (or all) of a shuffle that depends on the seed alone."""
    order = list(range(len(problems)))
    random.Random(f"subset:{seed}").shuffle(order)
    return tuple(problems[index] for index in order[:num])


def _load_arithmetic(split: str, prompt_file: PromptFile | None) -> ProblemSet:
    # Here, not at the top: only runs on the embedded task need it.
    from megatron_opsft.data.arithmetic import Split, load_arithmetic

    problems = load_arithmetic(cast(Split, split))  # refuses another split itself
    if prompt_file is not None:
        problems = [replace(p, text=prompt_file.render(p.text, {})) for p in problems]
    return make_set(ARITHMETIC, problems, range(1, len(problems) + 1), [])


def make_set(
    name: str,
    problems: Iterable[Problem],
    numbers: Iterable[int],
    bad_rows: list[BadRow],
    *,
    sources: tuple[str, ...] = (),
    parts: tuple[int, ...] = (),
) -> ProblemSet:
    """The set with its hash; arguments as in `ProblemSet`. Errors: `UserError` without a
    problem.
    """
    result = tuple(problems)
    if not result and not bad_rows:
        raise UserError(f"data: {name} is empty: it holds no row")
    if not result:
        first = f"; first: row {bad_rows[0].row}: {bad_rows[0].reason}"
        raise UserError(f"data: no usable row in {name} ({len(bad_rows)} bad rows{first})")
    digest = hashlib.sha256()
    for problem in result:
        told = [problem.id, problem.text, problem.answer]
        if problem.before:
            told.append(json.dumps(problem.before))
        if problem.fields:
            told.append(json.dumps(problem.fields, sort_keys=True))
        digest.update(json.dumps(told).encode() + b"\n")
    return ProblemSet(
        name=name,
        problems=result,
        rows=tuple(numbers),
        bad_rows=tuple(bad_rows),
        sha256=digest.hexdigest(),
        sources=sources,
        parts=parts,
    )
