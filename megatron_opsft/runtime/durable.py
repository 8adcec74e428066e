"""Writes files so that neither a kill nor a failing machine leaves half of one. Also the names of
files and directories of a step: `step_000042`, `step_000042.jsonl.gz`.
"""

import errno
import gzip
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError, causes, first_line, log
from megatron_opsft.records import JsonObject

COMPLETE = "complete.json"
"""File of a complete checkpoint: its step, and every file with its size."""
PARTIAL = ".partial_"
"""Prefix of a checkpoint that is being written."""
REPLACED = ".partial_replaced_"
"""Prefix of a checkpoint that is being replaced or deleted."""


class FullDiskError(UserError):
    """A file does not fit on its disk."""


# A full disk, a quota, the largest size of a file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def full_disk_behind(error: BaseException | None) -> OSError | None:
    """Return the failed write that caused an error, if the disk was full; else None.

    Torch's writer, for example, raises an error of its own when the write of its file fails.
    """
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return cause
    return None


def describe_failed_write(path: Path, num_bytes: int, error: BaseException) -> str:
    """Return a line such as `cannot write runs/a/x (12 bytes, 0 free): No space left on device`."""
    free = 0  # bytes, as far as they are known
    reason = getattr(error, "strerror", None) or first_line(error)
    is_full = getattr(error, "errno", None) == errno.ENOSPC
    if path.parent.is_dir():
        free = shutil.disk_usage(path.parent).free
        status = os.statvfs(path.parent)
        has_no_inodes = status.f_files > 0 and status.f_favail == 0
        if is_full and has_no_inodes:
            reason = (
                f"the file system has no inodes left: it holds {status.f_files:,} files and "
                "folders, and no more can be made; delete some"
            )
    return f"cannot write {path} ({num_bytes:,} bytes, {free:,} free): {reason}"


@contextmanager
def explaining_full_disk(path: Path, num_bytes: int) -> Iterator[None]:
    """Errors: `FullDiskError` if the block fails to write `path` because the disk is full."""
    try:
        yield
    except OSError as error:
        if (full := full_disk_behind(error)) is None:
            raise
        raise FullDiskError(describe_failed_write(path, num_bytes, full)) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file completely or not at all, even if the machine fails: first a temporary file
    beside it, then a rename.

    Errors: `FullDiskError`; then nothing of the new file remains.
    """
    partial = path.with_name(f".{path.name}.partial")
    with explaining_full_disk(path, len(data)):
        try:
            with open(partial, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write each file as `write_bytes` does. files: path relative to `directory` -> content."""
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(directory / name, content)


def append_line(path: Path, line: str) -> None:
    """Append a line completely or not at all, unless the machine fails.

    Errors: `FullDiskError`.
    """
    data = memoryview(line.encode("utf-8") + b"\n")
    with explaining_full_disk(path, len(data)), open(path, "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            while data:
                num_written = file.write(data)
                data = data[num_written:]
        except OSError:
            os.ftruncate(file.fileno(), size)
            raise


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, .jsonl or .jsonl.gz, without their line breaks; none if the file
    does not exist. A last line without a line break, as after a kill, is skipped with a warning.

    Errors: `UserError` if the file cannot be read to its end.
    """
    if not path.exists():
        return
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line[:-1]
                else:
                    log.warning(
                        "%s: the last line is incomplete, as after a kill; it is left out",
                        path,
                    )
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{path} cannot be read: {error}; restore or delete it"
        ) from error


def json_lines(path: Path) -> Iterator[JsonObject]:
    """Yield the JSON objects of `whole_lines`. Errors: `UserError`, also for any other line."""
    for number, line in enumerate(whole_lines(path), start=1):
        fault = ""
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                fault = f"not a JSON object but {json.dumps(row):.40}"
        except (ValueError, RecursionError):
            fault = "not a line of JSON"
        if fault:
            raise UserError(
                f"{path}:{number}: {fault}; restore the file, or delete that line"
            )
        yield row


def write_packed_lines(
    path: Path, rows: Iterable[Mapping[str, Any]], *, level: int
) -> None:
    """Write a gzip file with a line of JSON for each row, as `write_bytes` does. The same rows
    always give the same bytes. level: how strongly to compress, 1 to 9.
    """
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_bytes(path, gzip.compress(text.encode("utf-8"), compresslevel=level, mtime=0))


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON as `write_bytes` does."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync_path(path: Path) -> None:
    """Wait until a file, or the list of a directory's entries, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(new: Path, name: Path, replaced: Path) -> None:
    """Rename the directory `new` to `name`, and wait until that is on disk. An existing `name` is
    first renamed to `replaced`.

    The files in `new` must be on disk already. Errors: `OSError`; then both directories have
    their names again.
    """
    sync_path(new)
    if name.exists():
        put_aside(name, replaced)
    try:
        new.rename(name)
        sync_path(name.parent)
    except BaseException:
        if not new.exists():  # only the waiting failed
            name.rename(new)
        put_back(replaced, name)
        raise


def put_aside(path: Path, aside: Path) -> None:
    """Rename a directory to `aside`; an existing `aside` is deleted. Errors: `OSError`."""
    remove(aside, quietly=True)
    path.rename(aside)


def put_back(aside: Path, path: Path) -> None:
    """Rename `aside` back to `path`, unless `path` exists. Errors: `OSError`."""
    if aside.exists() and not path.exists():
        aside.rename(path)


def remove(path: Path, *, quietly: bool = False) -> None:
    """Delete a file, a link (not its target) or a directory tree; does nothing if it is missing.

    quietly: skip files of a tree that cannot be deleted, such as `.nfs*`, which somebody has open.
    Errors: `OSError`.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=quietly)
    else:
        path.unlink(missing_ok=True)


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all bytes at `offset` of an open file. Returns before the data is on disk."""
    while data:
        num_written = os.pwrite(file, data, offset)
        data = data[num_written:]
        offset += num_written


_STEP = "([0-9]{6}|[1-9][0-9]{6,})"  # as `step_name` writes it
_ROLLOUT_NAME = re.compile(f"step_{_STEP}(?:_rank_([0-9]{{4,}}))?\\.jsonl\\.gz")


def step_name(step: int, prefix: str = "step_") -> str:
    """Return the name of a directory of a step: its number has at least six digits."""
    return f"{prefix}{step:06d}"


def step_in(name: str, prefix: str = "step_") -> int | None:
    """Return the step whose `step_name` this is, exactly; None for any other name."""
    match = re.fullmatch(re.escape(prefix) + _STEP, name)
    return int(match[1]) if match else None


def in_step_order(
    paths: Iterable[Path], prefix: str = "step_"
) -> list[tuple[int, Path]]:
    """Return (step, path) of the paths with the `step_name` of a step, ascending."""
    paths_of_steps = []
    for path in paths:
        step = step_in(path.name, prefix)
        if step is not None:
            paths_of_steps.append((step, path))
    return sorted(paths_of_steps)


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in a directory, oldest first: neither temporary ones of a
    killed run, nor anything whose name no run gives.
    """
    checkpoints = in_step_order(directory.glob("step_*"))
    return [path for _, path in checkpoints if (path / COMPLETE).is_file()]


def rollout_name(step: int, rank: int | None = None) -> str:
    """Return the name of the file of a step's responses; rank: for the file of one rank alone."""
    of_rank = "" if rank is None else f"_rank_{rank:04d}"
    return f"{step_name(step)}{of_rank}.jsonl.gz"


def rollout_files(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of the files with a `rollout_name`, sorted by step and rank."""
    files = []
    for path in directory.glob("*"):
        if match := _ROLLOUT_NAME.fullmatch(path.name):
            files.append((int(match[1]), int(match[2] or 0), path))
    return [(step, path) for step, _, path in sorted(files)]
