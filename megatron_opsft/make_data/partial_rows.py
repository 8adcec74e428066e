"""What `data METHOD` has chosen so far, beside the file that it becomes: a kill loses no more than
the chunk of problems that is being sampled. Used by rank 0.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import append_line


class PartialRows:
    """JSON lines: the identity of what is made, then the rows of one chunk of problems each."""

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        """identity: JSON of all that decides a row. Errors: `UserError` where the file is of
        another one.
        """
        self.path = out.with_name(f"{out.name}.partial.jsonl")
        whole = self.path.read_bytes() if self.path.exists() else b""
        end = whole.rfind(b"\n") + 1  # behind it: what a kill tore
        if not end:
            self.path.unlink(missing_ok=True)
            append_line(self.path, json.dumps(identity))
            return
        if end < len(whole):
            self.path.write_bytes(whole[:end])
        if json.loads(whole.split(b"\n", 1)[0]) != json.loads(json.dumps(identity)):
            raise UserError(
                f"{self.path} has responses of other settings, problems or weights; remove it, or "
                "name another --out"
            )

    @property
    def num_problems(self) -> int:
        """Of the chunks that are done."""
        return sum(chunk["num_problems"] for chunk in self._chunks())

    def add(self, num_problems: int, rows: Sequence[StoredResponse]) -> None:
        """A chunk and what was chosen of it."""
        chunk = {"num_problems": num_problems, "rows": [asdict(row) for row in rows]}
        append_line(self.path, json.dumps(chunk))

    def read(self) -> list[StoredResponse]:
        """All rows, in the order they were added."""
        return [_row(fields) for chunk in self._chunks() for fields in chunk["rows"]]

    def _chunks(self) -> list[dict[str, Any]]:
        with self.path.open("rb") as lines:
            return [json.loads(line) for line in lines][1:]


def _row(fields: Mapping[str, Any]) -> StoredResponse:
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return StoredResponse(**given)
