"""JSON lines that a command appends as it goes, so that the same command continues after a kill."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.records import JsonObject
from megatron_opsft.runtime.durable import (
    append_line,
    json_lines,
    whole_lines,
    write_bytes,
)


class Journal:
    """A file of JSON lines, appended by one process at a time. A kill loses at most one append."""

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any] | None = None,
        words: Mapping[str, str] | None = None,
    ) -> None:
        """identity: what two starts of one job must share; if given, it is the first line. words:
        what errors call the parts of it.
        """
        self.path = path
        self._identity = identity
        self._words = words or {}

    def resume(self) -> list[JsonObject]:
        """Return the lines that earlier starts appended, and drop one that a kill tore.

        Call it before the first `append`. Errors: `UserError` for a file of another identity.
        """
        content = b"".join(line + b"\n" for line in whole_lines(self.path))
        write_bytes(self.path, content)
        if self._identity is None:
            return list(json_lines(self.path))
        if not content:
            self.append(self._identity)
        identity, *lines = json_lines(self.path)
        if identity != self._identity:
            keys = dict.fromkeys([*self._identity, *identity])
            others = [
                self._words.get(key, key)
                for key in keys
                if identity.get(key) != self._identity.get(key)
            ]
            raise UserError(
                f"{self.path} was begun with other {' and '.join(others)}; remove it, or name "
                "another --out"
            )
        return lines

    def append(self, *lines: Mapping[str, Any]) -> None:
        """Append lines in one write. Errors: `FullDiskError`."""
        append_line(
            self.path, "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
        )
