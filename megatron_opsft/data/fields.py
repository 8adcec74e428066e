"""Fields of a row by name. A dotted name reaches into objects, as `reward_model.ground_truth` does
into `{"reward_model": {"ground_truth": "42"}}`; a field of that very name comes first.
"""

from collections.abc import Iterator, Mapping
from typing import Any

ABSENT = object()  # null is a value


def find_field(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field, or `ABSENT`."""
    if name in fields:
        return fields[name]
    first, dot, rest = name.partition(".")
    inner = fields.get(first)
    return find_field(inner, rest) if dot and isinstance(inner, Mapping) else ABSENT


def names_of(fields: Mapping[str, Any]) -> Iterator[str]:
    """How the fields can be called; those of an object by their dotted names, in its place."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{name}.{inner}" for inner in names_of(value))
        else:
            yield name
