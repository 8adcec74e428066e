"""Problems of the embedded task, of a file, a saved or a Hugging Face data set.

A row that cannot be used is never dropped silently: it becomes a `BadRow` with its number and the
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
    choose_fields,
    field_of_chats,
    read_problem,
)
from megatron_opsft.data.sources import read_rows
from megatron_opsft.errors import RowError, UserError
from megatron_opsft.records import Problem, record
from megatron_opsft.runtime.formatting import count_of

ARITHMETIC = "arithmetic"
# The first words of the reason against a row that asks what is evaluated.
REPEATS = "repeats"
ALSO_IN = "also in"


def sha256_of(problems: Sequence[Problem]) -> str:
    """Return a hash of the problems in their order, by which a resumed run sees that its data
    changed.
    """
    digest = hashlib.sha256()
    for problem in problems:
        content = [problem.id, problem.text, problem.answer]
        if problem.before:
            content.append(json.dumps(problem.before))
        if problem.fields:
            content.append(json.dumps(problem.fields, sort_keys=True))
        digest.update(json.dumps(content).encode() + b"\n")
    return digest.hexdigest()


@record
class BadRow:
    """A row that was left out."""

    source: str
    row: int
    """The number of the row, from 1; the line of a JSONL file."""
    reason: str

    @property
    def place(self) -> str:
        """Where it is, see `place_of`."""
        return place_of(self.source, self.row)

    @property
    def is_repeat(self) -> bool:
        """True if it is left out because it repeats a held-out problem."""
        return self.reason.startswith(REPEATS)

    @property
    def is_evaluated(self) -> bool:
        """True if it is left out because an evaluation asks the same."""
        return self.reason.startswith((REPEATS, ALSO_IN))


def place_of(source: str, row: int) -> str:
    """Return where a row is, for messages: `FILE:LINE` only where its number is that of a line."""
    if source.removesuffix(".gz").endswith(".jsonl"):
        return f"{source}:{row}"
    return f"{source}, row {row}"


@dataclass(frozen=True, kw_only=True)
class ProblemSet:
    """The problems of one source, or of all sources of a mixture."""

    name: str
    """The name of the set in messages."""
    problems: tuple[Problem, ...]
    bad_rows: tuple[BadRow, ...]
    sources: tuple[str, ...]
    """The names of the sources; `Problem.source_index` counts them."""

    @cached_property
    def sha256(self) -> str:
        """The hash of the problems, see `sha256_of`."""
        return sha256_of(self.problems)

    def checked(self) -> "ProblemSet":
        """Return the set itself. Errors: `UserError` if it has no problem."""
        if not self.problems and not self.bad_rows:
            raise UserError(f"data: {self.name} is empty: it has no rows")
        if not self.problems:
            raise UserError(f"data: no usable row in {self.name}{self.refused}")
        return self

    @property
    def refused(self) -> str:
        """The number of bad rows and the reason of the first, in parentheses; "" if none is bad."""
        if not self.bad_rows:
            return ""
        first = self.bad_rows[0]
        num = count_of([len(self.bad_rows)], "bad row")
        return f" ({num}; first: row {first.row}: {first.reason})"


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

    split, subset: the part of a data set that is read; `arithmetic` has splits, too.
    problem_field, answer_field: None for the most common of PROBLEM_FIELDS or ANSWER_FIELDS; or
    for a column whose chats hold both, see `field_of_chats`. The same for both means chats.
    section: the prefix of config keys, for errors.
    template: a Jinja file makes the problems' texts; any other changes nothing here.
    with_fields: True to keep the remaining columns of the rows.
    Errors: `UserError` for a source that cannot be read, or has no such field or no usable row.
    """
    prompt_file = open_prompt_file(template)
    if source == ARITHMETIC:
        return _load_arithmetic(split, prompt_file)
    rows = read_rows(source, split=split, subset=subset, section=section)
    if problem_field is None and answer_field is None:
        problem_field = answer_field = field_of_chats(rows)
    problem_fields = PROBLEM_FIELDS if problem_field is None else (problem_field,)
    answer_fields = ANSWER_FIELDS if answer_field is None else (answer_field,)
    wanted = {
        f"{section}problem_field": problem_fields,
        f"{section}answer_field": answer_fields,
    }
    problem_field, answer_field = choose_fields(source, rows, wanted)
    problems: dict[str, Problem] = {}
    bad_rows = []
    for row in rows:
        try:
            problem = read_problem(
                row,
                problem_field=problem_field,
                answer_field=answer_field,
                prompt_file=prompt_file,
                with_fields=with_fields,
            )
        except RowError as error:
            bad_rows.append(BadRow(source=source, row=row.number, reason=str(error)))
            continue
        while problem.id in problems:  # an id that is taken gets the row's number, too
            problem = replace(problem, id=f"{problem.id}-{row.number}")
        problems[problem.id] = problem
    return ProblemSet(
        name=source,
        problems=tuple(problems.values()),
        bad_rows=tuple(bad_rows),
        sources=(source,),
    ).checked()


def fields_of(section: object) -> dict[str, Any]:
    """Return the keys of a config section that say how to read its source, for `load_problems`."""
    keys = ("subset", "problem_field", "answer_field")
    return {key: getattr(section, key) for key in keys}


def held_out_source(data: DataConfig, evaluation: EvalConfig) -> str | None:
    """Return the source of `load_held_out`: eval.data, or `arithmetic` if that is trained on."""
    if evaluation.data:
        return evaluation.data
    return ARITHMETIC if data.train == ARITHMETIC else None


def load_held_out(
    data: DataConfig, evaluation: EvalConfig, *, with_fields: bool = False
) -> ProblemSet | None:
    """Read the problems for evaluation from `held_out_source`; None if there is no source.

    The split is `test`, unless eval.split is set. If the source is also data.train, keys of `data`
    are used for keys of `eval` that are not set.
    Errors: `UserError` as in `load_problems`, and for keys of `eval` that are set without a source.
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
    """Return the first `num` problems (or all) of a shuffle that depends on the seed alone."""
    shuffled = list(problems)
    random.Random(f"subset:{seed}").shuffle(shuffled)
    return tuple(shuffled[:num])


def _load_arithmetic(split: str, prompt_file: PromptFile | None) -> ProblemSet:
    """Return the embedded task's problems; `prompt_file`, if any, makes their texts."""
    # Here, not at the top: only runs on the embedded task need it.
    from megatron_opsft.data.arithmetic import Split, load_arithmetic

    problems = load_arithmetic(cast(Split, split))  # refuses another split itself
    if prompt_file is not None:
        try:
            problems = [
                replace(problem, text=prompt_file.render(problem.text, {}))
                for problem in problems
            ]
        except RowError as error:
            raise UserError(f"{error}; a row of {ARITHMETIC} has no columns") from None
    return ProblemSet(
        name=ARITHMETIC, problems=tuple(problems), bad_rows=(), sources=(ARITHMETIC,)
    )
