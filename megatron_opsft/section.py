"""What all sections of a configuration have in common: frozen, no unknown key, finite numbers."""

import os
import re
from types import NoneType
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """Keys and their values, checked once, then unchanged; the text below a key is its meaning."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """Catch what YAML and Python read otherwise: true is 1 to Python; None, a word to YAML, is
        no value, and so is the nothing behind `key=`.
        """
        field = cls.model_fields[str(info.field_name)]
        kinds = {field.annotation, *get_args(field.annotation)}
        if isinstance(value, bool) and {int, float} & kinds:
            raise ValueError("write a number, not true or false")
        if value not in (None, "None"):
            return value
        if NoneType in kinds:
            return None
        if str in kinds and field.default != "":
            raise ValueError("write a text, or leave the key out")
        return "" if str in kinds else value


FREE = "free"
"""Marks, in `Annotated`, a key or a section that decides nothing of a run's numbers: a resumed run
may change it, and the hash of the configuration leaves it out.
"""
ADJUSTABLE = "adjustable"
"""Marks a key that decides numbers and that a remedy names: a resumed run may change it, and says
so.
"""
BY_CONTENT = "by content"
"""Marks a key that says where something is. A resumed run may find it elsewhere, and compares what
is there: manifest.json has its hash.
"""


def _expanded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    value = os.path.expandvars(value)
    if unknown := re.search(r"\$(\w+|\{\w+\})", value):
        raise ValueError(
            f"{unknown[0]} is no variable of the environment; set it, or write it out"
        )
    return os.path.expanduser(value)


# `~/x`, `$NAME/x` and `${NAME}/x`, as a shell expands them; it does not in a file or behind `key=`.
Expanded = BeforeValidator(_expanded)


def _parts(value: Any) -> Any:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
        if not all(value):
            raise ValueError("write words with one comma between them")
    return [value] if type(value) in (int, float) else value


# `a,b` and `a` where a list is wanted.
CommaSeparated = BeforeValidator(_parts)


def _named(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    pairs = [str(text).partition("=") for text in value]
    if not all(name and equals and path for name, equals, path in pairs):
        raise ValueError("write NAME=FILE, for example gsm8k=test.jsonl")
    return {name: path for name, _, path in pairs}


# A mapping, or NAME=FILE as often as there are names.
NamedFiles = Annotated[dict[str, Annotated[str, Expanded]], BeforeValidator(_named)]


class MixturePart(Section):
    """A source of a mixture; what it does not say is as in `data`."""

    path: Annotated[str, Expanded]
    weight: float = Field(1.0, gt=0)
    split: str | None = None
    subset: str | None = None
    problem_field: str | None = None
    answer_field: str | None = None


def _sources(value: Any) -> Any:
    """Errors: `ValueError` that names the entry."""
    if isinstance(value, str):
        return os.path.expanduser(value)
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("write a source, or a list of {path: ..., weight: ...}")
    parts = []
    for number, item in enumerate(value, start=1):
        try:
            parts.append(MixturePart.model_validate(item))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            keys = ", ".join(MixturePart.model_fields)
            raise ValueError(
                f"entry {number}{key and ': ' + key}: {first['msg']} (an entry has {keys})"
            ) from None
    return tuple(parts)


# One source, or several with weights.
Sources = Annotated[str | tuple[MixturePart, ...], BeforeValidator(_sources)]
SHIPPED_TEMPLATES = ("r1", "cod", "concise", "chat")


def _template_name(name: str) -> str:
    if name not in SHIPPED_TEMPLATES and not name.endswith(".jinja"):
        raise ValueError(
            f"{name!r} is not a template; write {', '.join(SHIPPED_TEMPLATES)}, or the path of "
            "a .jinja file; a message before each problem is system_prompt"
        )
    return name


# A prompt that is shipped, or a file of the user's.
TemplateName = Annotated[str, Expanded, AfterValidator(_template_name)]
MATH = "math"
_OWN_JUDGE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")


def _judge_name(name: str) -> str:
    if name != MATH and not _OWN_JUDGE.fullmatch(name):
        module, dot, function = name.rpartition(".")
        meant = (
            f"; did you mean {module}:{function}?" if dot and ":" not in name else ""
        )
        raise ValueError(
            f"{name!r} is not a judge; write {MATH}, or package.module:function{meant}"
        )
    return name


# The judge of mathematics, or a function of the user's.
JudgeName = Annotated[str, AfterValidator(_judge_name)]


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a key holds; None for a plain value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None
