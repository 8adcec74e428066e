"""The directory of an evaluation: made, reopened by the same command, never mixed with another."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from megatron_opsft.errors import UserError
from megatron_opsft.preflight import lock
from megatron_opsft.runtime.durable import remove, write_json

MANIFEST, NOT_SET = "manifest.json", "(not set)"
_KIND = "evaluation"
_WRITTEN = (
    "samples",
    "results.json",
    "table.md",
    "report.html",
)


def locked(directory: Path) -> AbstractContextManager[None]:
    """Hold the directory as a run holds its own; `UserError` where another process does."""
    return lock.locked(directory, "--out ")


def open_directory(directory: Path, identity: Mapping[str, Any], *, overwrite: bool) -> None:
    """Make it ready for this evaluation; samples that it holds already must be of the same one.

    identity: whatever decides a sample, JSON; below `data` one entry per benchmark, of which others
    may come and stay away. Errors: `UserError` naming what differs.
    """
    if not (directory / MANIFEST).exists():
        if found := [name for name in _WRITTEN if (directory / name).exists()]:
            raise UserError(
                f"--out {directory} holds {found[0]} but no {MANIFEST} of an evaluation; name "
                "another directory"
            )
        return
    before, now = flatten(read_manifest(directory)["identity"]), flatten(identity)
    if overwrite:
        for name in (*_WRITTEN, MANIFEST):
            remove(directory / name)
        return
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name, NOT_SET), now.get(name, NOT_SET)
        is_one_sided_data = name.startswith("data.") and NOT_SET in (old, new)
        if old != new and not is_one_sided_data:
            raise UserError(
                f"--out {directory} holds an evaluation with {name}={old}, not {new}; set it back, "
                "name another directory, or give --overwrite"
            )


def flatten(tree: Mapping[str, JsonValue], prefix: str = "") -> dict[str, str]:
    """Dotted name -> JSON of the value."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return flat


def read_manifest(directory: Path) -> dict[str, Any]:
    """manifest.json of an evaluation. Errors: `UserError` where it is none."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("kind") != _KIND:
        raise UserError(
            f"{directory} holds something else than an evaluation; name another directory"
        )
    return manifest


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write manifest.json whole or not at all. What it reported before stays in it: starts, and the
    data of benchmarks that this command leaves out, whose samples are still in the directory.
    """
    starts, data = [], manifest["identity"]["data"]
    if (directory / MANIFEST).exists():
        before = read_manifest(directory)
        starts, data = before["starts"], before["identity"].get("data", {}) | data
    identity = manifest["identity"] | {"data": data}
    write_json(
        directory / MANIFEST, {"kind": _KIND, **manifest, "identity": identity, "starts": starts}
    )


def note_start(directory: Path, start: Mapping[str, Any]) -> None:
    """Add what one start of the evaluation did: how many samples, how fast, on how many ranks."""
    manifest = read_manifest(directory)
    manifest["starts"].append(dict(start))
    write_json(directory / MANIFEST, manifest)
