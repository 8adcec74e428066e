"""What all sections of a configuration have in common: frozen, no unknown key, finite numbers."""

import json
import os
import re
from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    JsonValue,
    PositiveFloat,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """Keys and their values, checked once and never changed. The text below a key explains it."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_as_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """Read three values as the user meant them, not as Python or YAML does.

        A bool is no number, though Python takes true for 1. The word `None` (text in YAML) and an
        empty value, as in `key=`, both mean "no value".
        """
        field = cls.model_fields[str(info.field_name)]
        kinds = {field.annotation, *get_args(field.annotation)}
        if isinstance(value, bool) and {int, float} & kinds:
            raise ValueError("write a number, not true or false")
        if value not in (None, "None"):
            return value
        if NoneType in kinds:
            return None
        if str not in kinds:
            return value
        if field.default != "":
            raise ValueError("write a text, or leave the key out")
        return ""


FREE = "free"
"""Marks, in `Annotated`, a key or a section that decides nothing about a run's numbers: a resumed
run may change it, and the hash of the configuration leaves it out.
"""
ADJUSTABLE = "adjustable"
"""Marks a key that decides numbers and that some advice tells the user to change: a resumed run
may change it, and reports that it did.
"""
BY_CONTENT = "by content"
"""Marks a key that says where data is. A resumed run may name another location. It compares the
data itself, whose hash is in manifest.json.
"""


def _expand_variables(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    value = os.path.expandvars(value)
    if unknown := re.search(r"\$(\w+|\{\w+\})", value):
        raise ValueError(
            f"{unknown[0]} is no variable of the environment; set it, or write it out"
        )
    return os.path.expanduser(value)


# `~/x`, `$NAME/x` and `${NAME}/x` as a shell expands them, which it does neither in a YAML file
# nor behind `key=`.
Expanded = BeforeValidator(_expand_variables)


def _split_at_commas(value: Any) -> Any:
    """Make a list of a text `a,b` or of a single number; leave any other value to pydantic."""
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",")]
        if not all(value):
            raise ValueError("write words with one comma between them")
    if type(value) in (int, float):
        return [value]
    return value


# A list may be written `a,b`, and a list of one `a`.
CommaSeparated = BeforeValidator(_split_at_commas)


def _split_named_files(value: Any) -> Any:
    """Make a mapping of a list of NAME=FILE; leave any other value to pydantic."""
    if not isinstance(value, list | tuple):
        return value
    files = {}
    for text in value:
        name, _, path = str(text).partition("=")
        if not name or not path:
            raise ValueError("write NAME=FILE, for example gsm8k=test.jsonl")
        files[name] = path
    return files


# A mapping of names to files, or a list of NAME=FILE.
NamedFiles = Annotated[
    dict[str, Annotated[str, Expanded]], BeforeValidator(_split_named_files)
]


class MixturePart(Section):
    """One source of a mixture. A key that it leaves out has the value of that key in `data`."""

    path: Annotated[str, Expanded]
    weight: PositiveFloat = 1.0
    """Share of the problems that are drawn from this source, relative to the other weights."""
    split: str | None = None
    subset: str | None = None
    problem_field: str | None = None
    answer_field: str | None = None


def _read_sources(value: Any) -> Any:
    """Errors: `ValueError` that names the entry and its key."""
    if isinstance(value, str):
        return os.path.expanduser(value)
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("write a source, or a list of {path: ..., weight: ...}")
    sources = []
    for number, item in enumerate(value, start=1):
        try:
            sources.append(MixturePart.model_validate(item))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            entry = f"entry {number}: {key}" if key else f"entry {number}"
            keys = ", ".join(MixturePart.model_fields)
            raise ValueError(f"{entry}: {first['msg']} (an entry has {keys})") from None
    return tuple(sources)


# One source, or several with weights.
Sources = Annotated[str | tuple[MixturePart, ...], BeforeValidator(_read_sources)]
SHIPPED_TEMPLATES = ("r1", "cod", "concise", "chat")


def _check_template(name: str) -> str:
    if name not in SHIPPED_TEMPLATES and not name.endswith(".jinja"):
        raise ValueError(
            f"{name!r} is not a template; write {', '.join(SHIPPED_TEMPLATES)}, or the path of "
            "a .jinja file; a message before each problem is system_prompt"
        )
    return name


# The name of a shipped prompt, or the path of the user's.
TemplateName = Annotated[str, Expanded, AfterValidator(_check_template)]

# A shipped chat template.
ChatTemplateName = Literal["chatml"]


def _read_arguments(value: Any) -> Any:
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return value or None
    if value is None:
        return None
    raise ValueError("write a mapping of names, such as {enable_thinking: false}")


# Arguments of a chat template by name, with any JSON as a value; none is null.
TemplateArguments = Annotated[
    dict[str, JsonValue] | None, BeforeValidator(_read_arguments)
]
MATH = "math"
_WORD = r"[^\W\d]\w*"
_USERS_JUDGE = re.compile(rf"(?:{_WORD}(?:\.{_WORD})*|[^\n]+\.py):{_WORD}")


def check_judge_name(name: str) -> str:
    """Return the name of a judge. Errors: `ValueError`, with the forms that it may have."""
    if name == MATH or _USERS_JUDGE.fullmatch(name):
        return name
    message = f"{name!r} is not a judge; write {MATH}, package.module:function, or FILE.py:function"
    module, dot, function = name.rpartition(".")
    if dot and ":" not in name:
        message += f"; did you mean {module}:{function}?"
    raise ValueError(message)


# The shipped judge of mathematics, or a function of the user's.
JudgeName = Annotated[str, AfterValidator(check_judge_name)]


def is_other_json(one: Any, other: Any) -> bool:
    """True if two values differ as JSON: 0, 0.0 and false do, though Python calls them equal."""
    return json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True)


def section_class(field: FieldInfo) -> type[Section] | None:
    """Return the section that a key holds; None for a key with a plain value."""
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind
    return None
