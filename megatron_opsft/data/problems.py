"""Reads problems from the embedded task, JSONL, Parquet, a saved data set or a Hugging Face data
set.

A row that cannot be used is never dropped silently: it becomes a `BadRow` with its place and the
reason. A source without a single usable row is a `UserError`.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from megatron_opsft.config import DataConfig, EvalConfig
from megatron_opsft.data.prompt_file import PromptFile, open_prompt_file
from megatron_opsft.data.rows import (
    ANSWER_FIELDS,
    PROBLEM_FIELDS,
    RowReader,
    choose_fields,
)
from megatron_opsft.data.sources import read_rows
from megatron_opsft.errors import RowError, UserError
from megatron_opsft.records import Problem

ARITHMETIC = "arithmetic"


def sha256_of(problems: Sequence[Problem]) -> str:
    """Of the ids, texts, answers and fields in order, so that a resumed run can tell whether its
    data changed.
    """
    digest = hashlib.sha256()
    for problem in problems:
        told = [problem.id, problem.text, problem.answer]
        if problem.before:
            told.append(json.dumps(problem.before))
        if problem.fields:
            told.append(json.dumps(problem.fields, sort_keys=True))
        digest.update(json.dumps(told).encode() + b"\n")
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row left out: `row` counts from 1 (of a JSONL file it is the line)."""

    source: str
    row: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class ProblemSet:
    """What was read from one source, or from those of a mixture; sources: their names."""

    name: str
    problems: tuple[Problem, ...]
    bad_rows: tuple[BadRow, ...]
    sources: tuple[str, ...]

    @cached_property
    def sha256(self) -> str:
        """See `sha256_of`."""
        return sha256_of(self.problems)

    def checked(self) -> "ProblemSet":
        """Errors: `UserError` without a problem."""
        if not self.problems and not self.bad_rows:
            raise UserError(f"data: {self.name} is empty: it has no rows")
        if not self.problems:
            raise UserError(f"data: no usable row in {self.name}{self.refused}")
        return self

    @property
    def refused(self) -> str:
        """How many rows are bad, and why the first one is, in brackets; "" if none is."""
        if not self.bad_rows:
            return ""
        first = self.bad_rows[0]
        return (
            f" ({len(self.bad_rows)} bad rows; first: row {first.row}: {first.reason})"
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

    split, subset: of data sets (and split of `arithmetic`). A field that is None is the most common
    of PROBLEM_FIELDS or ANSWER_FIELDS. section: the prefix of keys in errors. template: a Jinja
    file makes the problems' texts; any other changes nothing here. with_fields: problems keep the
    other columns of their rows. Errors: `UserError` for a source that cannot be read, or has no
    such field or no usable row.
    """
    prompt_file = open_prompt_file(template)
    if source == ARITHMETIC:
        return _load_arithmetic(split, prompt_file)
    rows = read_rows(source, split=split, subset=subset, section=section)
    of_problem, of_answer = choose_fields(
        source,
        rows,
        (
            (f"{section}problem_field", problem_field, PROBLEM_FIELDS),
            (f"{section}answer_field", answer_field, ANSWER_FIELDS),
        ),
    )
    reader = RowReader(
        problem_field=of_problem,
        answer_field=of_answer,
        prompt_file=prompt_file,
        with_fields=with_fields,
    )
    problems: list[Problem] = []
    bad_rows: list[BadRow] = []
    for row in rows:
        try:
            problems.append(reader.read(row))
        except RowError as error:
            bad_rows.append(BadRow(source=source, row=row.number, reason=str(error)))
    return ProblemSet(
        name=source,
        problems=tuple(problems),
        bad_rows=tuple(bad_rows),
        sources=(source,),
    ).checked()


def fields_of(section: object) -> dict[str, Any]:
    """What a part of a configuration says of the rows of its source, for `load_problems`."""
    return {
        key: getattr(section, key)
        for key in ("subset", "problem_field", "answer_field")
    }


def held_out_source(data: DataConfig, evaluation: EvalConfig) -> str | None:
    """What `load_held_out` reads: eval.data, or `arithmetic` for its training; None for neither."""
    return evaluation.data or (ARITHMETIC if data.train == ARITHMETIC else None)


def load_held_out(
    data: DataConfig, evaluation: EvalConfig, *, with_fields: bool = False
) -> ProblemSet | None:
    """Problems for evaluation: eval.data, of a data set its split `test`; where that is data.train,
    with data's subset and fields. Without eval.data those of `arithmetic` for its training, else
    None.

    Errors: `UserError` as of `load_problems`, and for keys of `eval` that nothing is read with.
    """
    source = held_out_source(data, evaluation)
    keys = fields_of(evaluation)
    if source is None:
        for key, value in ({"split": evaluation.split} | keys).items():
            if value is not None:
                raise UserError(
                    f"eval.{key}={value}: nothing is read with it; set eval.data"
                )
        return None
    if source == data.train:
        keys = {key: value or getattr(data, key) for key, value in keys.items()}
    return load_problems(
        source,
        split=evaluation.split or "test",
        **keys,
        section="eval.",
        template=data.template,
        with_fields=with_fields,
    )


def shuffled_subset(
    problems: Sequence[Problem], num: int, seed: int
) -> tuple[Problem, ...]:
    """The first `num` problems (or all) of a shuffle that depends on the seed alone."""
    order = list(range(len(problems)))
    random.Random(f"subset:{seed}").shuffle(order)
    return tuple(problems[index] for index in order[:num])


def _load_arithmetic(split: str, prompt_file: PromptFile | None) -> ProblemSet:
    # Here, not at the top: only runs on the embedded task need it.
    from megatron_opsft.data.arithmetic import Split, load_arithmetic

    problems = load_arithmetic(cast(Split, split))  # refuses another split itself
    if prompt_file is not None:
        try:
            problems = [
                replace(p, text=prompt_file.render(p.text, {})) for p in problems
            ]
        except RowError as error:
            raise UserError(f"{error}; a row of {ARITHMETIC} has no columns") from None
    return ProblemSet(
        name=ARITHMETIC, problems=tuple(problems), bad_rows=(), sources=(ARITHMETIC,)
    )
