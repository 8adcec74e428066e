"""The table of all keys of a configuration: what `--reference` prints and docs/ has."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_opsft.config import Config
from megatron_opsft.config_section import section_of
from megatron_opsft.methods.catalog import METHODS
from megatron_opsft.methods.settings import MethodSettings


def reference_table(model: type[BaseModel] = Config) -> str:
    """All keys with defaults and meaning as a Markdown table; those of docs/."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, default, meaning in _rows(model):
        escaped = default.replace("|", r"\|")
        lines.append(f"| `{key}` | {escaped} | {meaning} |")
    return "\n".join(lines)


def _rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for key, field in model.model_fields.items():
        section = section_of(field)
        if section is MethodSettings:
            yield from _method_rows()
        elif section:
            yield from _rows(section, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _default_of(field), str(field.description)


def _method_rows() -> Iterator[tuple[str, str, str]]:
    """Keys of all methods; one row where several have a key with the same default and meaning."""
    which = MethodSettings.model_fields["name"]
    yield "method.name", _default_of(which), str(which.description)
    owners: dict[str, dict[tuple[str, str], list[str]]] = {}
    for name, method in METHODS.items():
        for key, field in method.model_fields.items():
            if key != "name":
                row = (_default_of(field), str(field.description))
                owners.setdefault(key, {}).setdefault(row, []).append(name)
    for key, rows in owners.items():
        for (default, meaning), names in rows.items():
            many = "the others" if len(rows) > 1 else "most methods"
            whose = ", ".join(names) if len(names) <= 9 else many
            yield f"method.{key}", default, f"{meaning} ({whose})"


def _default_of(field: FieldInfo) -> str:
    return "required" if field.is_required() else f"`{_show(field.default)}`"


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    plain = isinstance(value, str | float | Path) and str(value).isprintable()
    return str(value) if plain else json.dumps(value)
