"""Writing files so that neither a kill nor a failing machine leaves half of one; and names of the
files and directories of a step: `step_000042`, `step_000042.jsonl.gz`.
"""

import errno
import gzip
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError, first_line

log = logging.getLogger("megatron_opsft")

COMPLETE = "complete.json"  # of a checkpoint: step, and every file with its size
# Of checkpoints that are being written, and of those that are being replaced or deleted.
PARTIAL, REPLACED = ".partial_", ".partial_replaced_"


class FullDiskError(UserError):
    """A file that does not fit. Which command continues afterwards, its caller knows."""


_FULL = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
)  # a full disk, a quota, the limit of a file


def full_disk_behind(error: BaseException | None) -> OSError | None:
    """The failed write behind an error, if that was because nothing more fits.

    Torch's writer, for one, ends with an error of its own when its file does.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def describe_failed_write(path: Path, num_bytes: int, error: BaseException) -> str:
    """Such as `cannot write runs/a/x (12 bytes, 0 free): No space left on device`."""
    free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
    reason = getattr(error, "strerror", None) or first_line(error)
    if getattr(error, "errno", None) == errno.ENOSPC and path.parent.is_dir():
        inodes = os.statvfs(path.parent)
        if inodes.f_files and not inodes.f_favail:
            reason = (
                f"the file system has no inodes left: it holds {inodes.f_files:,} files and "
                "folders, and no more can be made; delete some"
            )
    return f"cannot write {path} ({num_bytes:,} bytes, {free:,} free): {reason}"


@contextmanager
def explaining_full_disk(path: Path, num_bytes: int) -> Iterator[None]:
    """Errors: `FullDiskError` when what is written to `path` inside does not fit."""
    try:
        yield
    except OSError as error:
        if (full := full_disk_behind(error)) is None:
            raise
        raise FullDiskError(describe_failed_write(path, num_bytes, full)) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write whole or not at all, even if the machine fails: a file beside it, then a rename.

    Errors: `FullDiskError`; nothing is left of the new file then.
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
    """`write_bytes` of files of the given relative names and contents."""
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(directory / name, content)


def append_line(path: Path, line: str) -> None:
    """Add a line, whole or not at all unless the machine fails. Errors: as of `write_bytes`."""
    data = memoryview(line.encode("utf-8") + b"\n")
    with explaining_full_disk(path, len(data)), open(path, "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            os.ftruncate(file.fileno(), size)
            raise


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, .jsonl or .jsonl.gz, one by one and without their breaks; none without a
    file. A last one that has no break, as a kill leaves it, is left out with a warning.

    Errors: `UserError` where the file cannot be read, or not to its end.
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


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in `whole_lines`. Errors: `UserError`, also for a line that is no JSON object."""
    for number, line in enumerate(whole_lines(path), start=1):
        wrong = "not a line of JSON"
        try:
            row = json.loads(line)
            wrong = (
                ""
                if isinstance(row, dict)
                else f"not a JSON object but {json.dumps(row):.40}"
            )
        except (ValueError, RecursionError):
            pass
        if wrong:
            raise UserError(
                f"{path}:{number}: {wrong}; restore the file, or delete that line"
            )
        yield row


def write_packed_lines(
    path: Path, rows: Iterable[Mapping[str, Any]], *, level: int
) -> None:
    """A gzip file with a line of JSON for each row, whole or not at all; the same rows give the
    same bytes. level: of the compression, 1 to 9.
    """
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_bytes(path, gzip.compress(text.encode("utf-8"), compresslevel=level, mtime=0))


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of UTF-8 text."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` of indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync_path(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(new: Path, name: Path, replaced: Path) -> None:
    """Give the directory `new` its name, on disk; what had the name is `replaced` then.

    The files in `new` are on disk already. Errors: `OSError`; what had the name still has it then.
    """
    sync_path(new)
    if name.exists():
        put_aside(name, replaced)
    try:
        new.rename(name)
    except BaseException:
        put_back(replaced, name)
        raise
    sync_path(name.parent)


def put_aside(path: Path, aside: Path) -> None:
    """Give a directory the name `aside`; what had it is removed. Errors: `OSError`."""
    remove(aside, quietly=True)
    path.rename(aside)


def put_back(aside: Path, path: Path) -> None:
    """Give back its name to what was put aside, if the name is free. Errors: `OSError`."""
    if aside.exists() and not path.exists():
        aside.rename(path)


def remove(path: Path, *, quietly: bool = False) -> None:
    """Delete a file, a link itself, or a tree; nothing where there is none.

    quietly: what cannot be deleted of a tree stays, such as `.nfs*`, files that somebody still has
    open. Errors: `OSError`.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=quietly)
    else:
        path.unlink(missing_ok=True)


def write_at(file: int, data: memoryview, offset: int) -> None:
    """All bytes at `offset` of an open file; with the kernel then, not yet on disk."""
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


_NUMBER = "[0-9]{6}|[1-9][0-9]{6,}"  # of a step, as `step_name` writes it


def step_name(step: int, before: str = "step_", behind: str = "") -> str:
    """The name of what belongs to a step, with at least six digits."""
    return f"{before}{step:06d}{behind}"


def step_in(name: str, before: str = "step_", behind: str = "") -> int | None:
    """The step whose `step_name` this is, exactly; None for any other name."""
    found = re.fullmatch(f"{re.escape(before)}({_NUMBER}){re.escape(behind)}", name)
    return int(found[1]) if found else None


def in_step_order(
    paths: Iterable[Path], before: str = "step_", behind: str = ""
) -> list[tuple[int, Path]]:
    """(step, path) of the paths that belong to a step, ascending; others are left out."""
    found = [(step_in(path.name, before, behind), path) for path in paths]
    return sorted((step, path) for step, path in found if step is not None)


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first; temporary ones of a killed run are not among them, nor
    is anything with another name than a run gives.
    """
    there = in_step_order(directory.glob("step_*"))
    return [path for _, path in there if (path / COMPLETE).is_file()]


def rollout_name(step: int, rank: int | None = None) -> str:
    """The file of a step's responses; rank: that wrote it, where there are files of several."""
    return step_name(
        step, behind=f"{'' if rank is None else f'_rank_{rank:04d}'}.jsonl.gz"
    )


def rollout_files(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of the files with responses, by step and rank; others are left out."""
    found = []
    for path in directory.glob("*"):
        if match := re.fullmatch(
            f"step_({_NUMBER})(?:_rank_([0-9]{{4,}}))?.jsonl.gz", path.name
        ):
            found.append((int(match[1]), int(match[2] or 0), path))
    return [(step, path) for step, _, path in sorted(found)]
