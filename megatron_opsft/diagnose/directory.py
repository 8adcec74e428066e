"""The directory of a diagnosis: reopened by the same command, never mixed with anything else; and
what is done, line by line.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from megatron_opsft.errors import UserError
from megatron_opsft.report.diagnosis import KIND, MANIFEST, SUMMARY, TOKENS, parse_response
from megatron_opsft.runtime.durable import append_line, write_bytes, write_json
from megatron_opsft.storage.replacing import remove_entry

PAGE, REPORT = "tokens.html", "report.html"  # of `diagnose` and of `report`
PICTURES = ("tokens.png", "positions.png", "kinds.png", "word_cloud.png")
_OWN = (SUMMARY, TOKENS, PAGE, *PICTURES, "parts", "responses", MANIFEST)
_Key = tuple[str, int]


def check_out(directory: Path, *, overwrite: bool) -> None:
    """Errors: `UserError` where a diagnosis cannot be. overwrite: delete the one that is there,
    its own files alone.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"--out {directory} is a file; name a directory")
    if not (directory / MANIFEST).exists():
        if found := [name for name in _OWN if (directory / name).exists()]:
            raise UserError(
                f"--out {directory} holds {found[0]} but no {MANIFEST} of a diagnosis; name "
                "another directory"
            )
    elif _manifest(directory).get("kind") != KIND:
        raise UserError(
            f"--out {directory} holds something else than a diagnosis; name another directory"
        )
    elif overwrite:
        for name in (*_OWN, REPORT):
            remove_entry(directory / name)


def open_directory(directory: Path, identity: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Make it this diagnosis's, or continue that one. identity: whatever decides a line, JSON;
    facts: for people. Errors: `UserError` naming what differs.
    """
    if (directory / MANIFEST).exists():
        before = _manifest(directory).get("identity", {})
        for name, value in identity.items():
            if before.get(name) != value:
                raise UserError(
                    f"--out {directory} holds a diagnosis with another {name}; set it back, name "
                    "another directory, or give --overwrite"
                )
    write_json(directory / MANIFEST, {"kind": KIND, **facts, "identity": identity})


def _manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; name another directory") from None
    return manifest if isinstance(manifest, dict) else {}


class Parts:
    """Lines of tokens.jsonl as they come; any number of processes may append, each to its file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts = directory / "parts"
        self._mine = self._parts / f"{uuid4().hex}.jsonl"

    def append(self, row: Mapping[str, Any]) -> None:
        """A kill of the process loses none of it."""
        self._parts.mkdir(parents=True, exist_ok=True)
        append_line(self._mine, json.dumps(row, ensure_ascii=False))

    def done(self) -> set[_Key]:
        """(problem id, sample index) of what is there."""
        return {key for key, _ in self._lines()}

    def combine(self, order: Sequence[_Key]) -> None:
        """Make tokens.jsonl of all, in this order; a kill in between loses nothing."""
        lines = dict(self._lines())
        write_bytes(self._directory / TOKENS, b"".join(lines[key] for key in order))
        remove_entry(self._parts)

    def _lines(self) -> Iterator[tuple[_Key, bytes]]:
        """Whole ones; what a kill or a failing machine tore is diagnosed again."""
        whole = self._directory / TOKENS
        for path in [*([whole] if whole.exists() else []), *sorted(self._parts.glob("*.jsonl"))]:
            with open(path, "rb") as lines:
                for line in lines:
                    try:
                        row = parse_response(line)
                    except (ValueError, TypeError, KeyError):
                        continue
                    if line.endswith(b"\n"):
                        yield (row.problem_id, row.sample_index), line
