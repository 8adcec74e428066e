"""The directory of an evaluation: made, reopened by the same command, never mixed with another."""

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import write_json
from megatron_opsft.storage.replacing import remove_entry

log = logging.getLogger("megatron_opsft")
MANIFEST = "manifest.json"
_KIND = "evaluation"
_WRITTEN = (
    "samples",
    "results.json",
    "table.md",
    "report.html",
)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory; `UserError` where another process does. A kill lets go of it."""
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--out {directory}: another process is writing there; wait for it, or name "
                "another directory"
            ) from None
        yield
    finally:
        os.close(handle)


def open_directory(directory: Path, identity: Mapping[str, Any], *, overwrite: bool) -> None:
    """Make it ready for this evaluation; samples that it holds already must be of the same one.

    identity: whatever decides a sample, JSON; below `data` one entry per benchmark, of which new
    ones may come. What an earlier version did not record is taken to be as it is now, and logged.
    Errors: `UserError` naming what differs.
    """
    path = directory / MANIFEST
    if not path.exists():
        if found := [name for name in _WRITTEN if (directory / name).exists()]:
            raise UserError(
                f"--out {directory} holds {found[0]} but no {MANIFEST} of an evaluation; name "
                "another directory"
            )
        return
    manifest = read_manifest(directory)
    if overwrite:
        for name in (*_WRITTEN, MANIFEST):
            remove_entry(directory / name)
        return
    before = manifest["identity"]
    for name, old, new in _differences(before, json.loads(json.dumps(identity))):
        raise UserError(
            f"--out {directory} holds an evaluation with {name}={json.dumps(old)}, not "
            f"{json.dumps(new)}; set it back, name another directory, or give --overwrite"
        )
    if unknown := [name for name in identity if name not in before]:
        log.info(
            "%s was begun by a version that did not record %s: taken to be as now",
            *(directory, ", ".join(unknown)),
        )


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


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> Sequence[tuple[str, Any, Any]]:
    """(dotted name, old, new) of what differs. What `old` has not is unknown and does not count,
    nor does a benchmark that `new` leaves out.
    """
    found: list[tuple[str, Any, Any]] = []
    for key, a in old.items():
        if key not in new and prefix == "data.":
            continue
        b = new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append((f"{prefix}{key}", a, b))
    return found
