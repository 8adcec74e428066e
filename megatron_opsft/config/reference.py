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
    for cells in _rows(model):
        key, default, meaning = (cell.replace("|", r"\|") for cell in cells)
        lines.append(f"| `{key}` | {default} | {meaning} |")
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
    """Keys of all methods; one row where several have a key with the same meaning."""
    which = MethodSettings.model_fields["name"]
    yield "method.name", _default_of(which), str(which.description)
    owners: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, method in METHODS.items():
        for key, field in method.model_fields.items():
            if key != "name":
                defaults = owners.setdefault((key, str(field.description)), {})
                defaults.setdefault(_default_of(field), []).append(name)
    for (key, meaning), defaults in owners.items():
        names = [name for each in defaults.values() for name in each]
        usual = max(defaults, key=lambda default: len(defaults[default]))
        special = [f"{default} ({', '.join(whose)})" for default, whose in defaults.items()]
        shown = [each for default, each in zip(defaults, special, strict=True) if default != usual]
        whose = ", ".join(names) if len(names) <= 9 else "most methods"
        yield f"method.{key}", "; ".join([usual, *shown]), f"{meaning} ({whose})"


def _default_of(field: FieldInfo) -> str:
    return "required" if field.is_required() else f"`{_show(field.default)}`"


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    plain = isinstance(value, str | float | Path) and str(value).isprintable()
    return str(value) if plain else json.dumps(value)
