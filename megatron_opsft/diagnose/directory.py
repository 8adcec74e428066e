"""The directory of a diagnosis: continued by the same command, never mixed with anything else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.report.diagnosis import (
    KIND,
    MANIFEST,
    SUMMARY,
    TOKENS,
    parse_response,
    read_manifest,
)
from megatron_opsft.runtime.durable import remove, write_bytes, write_json

PAGE, REPORT = "tokens.html", "report.html"  # of `diagnose` and of `report`
_WRITTEN = (SUMMARY, TOKENS, PAGE)


def check_out(directory: Path, *, overwrite: bool) -> None:
    """Errors: `UserError` where a diagnosis cannot be. overwrite: delete the one that is there,
    its own files alone.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"--out {directory} is a file; name a directory")
    if not (directory / MANIFEST).exists():
        if found := [name for name in _WRITTEN if (directory / name).exists()]:
            raise UserError(
                f"--out {directory} holds {found[0]} but no {MANIFEST} of a diagnosis; name "
                "another directory"
            )
    elif read_manifest(directory).get("kind") != KIND:
        raise UserError(
            f"--out {directory} holds something else than a diagnosis; name another directory"
        )
    elif overwrite:
        for name in (*_WRITTEN, "responses", MANIFEST, REPORT):
            remove(directory / name)


def open_directory(directory: Path, identity: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Make it this diagnosis's, or continue that one. identity: whatever decides a line, JSON;
    facts: for people. Errors: `UserError` naming what differs.
    """
    if (directory / MANIFEST).exists():
        before = read_manifest(directory).get("identity", {})
        for name, value in identity.items():
            if before.get(name) != value:
                raise UserError(
                    f"--out {directory} holds a diagnosis with another {name}; set it back, name "
                    "another directory, or give --overwrite"
                )
    write_json(directory / MANIFEST, {"kind": KIND, **facts, "identity": identity})


def keys_of_whole_lines(tokens: Path) -> set[tuple[str, int]]:
    """(problem id, sample index) of what tokens.jsonl holds. What a failing machine tore is cut
    off, and will be diagnosed again.
    """
    lines = tokens.read_bytes().splitlines(keepends=True) if tokens.exists() else []
    whole = {}
    for line in lines:
        try:
            row = parse_response(line)
        except (ValueError, TypeError, KeyError):
            continue
        if line.endswith(b"\n"):
            whole[row.problem_id, row.sample_index] = line
    if len(whole) < len(lines):
        write_bytes(tokens, b"".join(whole.values()))
    return set(whole)
