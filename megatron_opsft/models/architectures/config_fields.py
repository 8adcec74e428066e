"""The fields of a `config.json`, read with checks."""

import json
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from megatron_opsft.errors import UserError
from megatron_opsft.records import JsonObject

N = TypeVar("N", int, float)


class Fields(NamedTuple):
    """The fields of a config.json, read with checks. Errors: `UserError` that names the file."""

    path: Path
    values: JsonObject
    prefix: str = ""
    """Name of the object that holds the fields, and a dot; empty for the file itself."""

    def fail(self, message: str) -> NoReturn:
        raise UserError(f"{self.path}: {message}")

    def positive(self, name: str, kind: type[N], default: N | None = None) -> N:
        """Read a positive number, a whole one if `kind` is int."""
        value: Any = self.values.get(name)
        if value is None:
            value = default
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        if not is_number or not 0 < value < 2**40:
            number = "whole number" if kind is int else "number"
            self.fail(
                f"{self.prefix}{name} must be a positive {number}, not {json.dumps(value)}"
            )
        return kind(value)

    def positive_or_none(self, name: str) -> float | None:
        """Read a positive number; None if the field is absent or null."""
        if self.values.get(name) is None:
            return None
        return self.positive(name, float)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Read true or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(
                f"{self.prefix}{name} must be true or false, not {json.dumps(value)}"
            )
        return value

    def check_fixed(self, name: str, supported: object) -> None:
        """Check that a field is absent, null, or has the only supported value."""
        value = self.values.get(name)
        if value is not None and value != supported:
            self.fail(
                f"{self.prefix}{name}={json.dumps(value)} is not supported, only "
                f"{self.prefix}{name}={json.dumps(supported)}"
            )
