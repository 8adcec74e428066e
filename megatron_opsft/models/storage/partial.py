"""Write an output in a hidden directory, by one process, until it is complete.

Beside the output `NAME` is the directory `.NAME.partial/`. In it, `data/` becomes the output, and
the process that writes it holds `lock`. `replaced/` is the directory that had the name before, in
the moment between two renames; it is called `old/` while it is being deleted, since only a complete
directory may get its name back.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.large_files import LargeFile
from megatron_opsft.runtime.durable import (
    FullDiskError,
    full_disk_behind,
    publish,
    put_aside,
    put_back,
    remove,
)


def partial_dir(out_dir: Path) -> Path:
    """Return the directory in which an output is written before it appears."""
    return out_dir.parent / f".{out_dir.name}.partial"


class PlannedFile(NamedTuple):
    """A large file of an output."""

    name: str
    num_bytes: int
    constants: tuple[tuple[int, bytes], ...]
    """The bytes between the tensors, as (offset, bytes)."""


class PartialFiles(NamedTuple):
    """An output that is being written."""

    directory: Path
    files: dict[str, LargeFile]
    """The planned files, by name."""


@contextmanager
def written_whole(
    out_dir: Path, planned: Sequence[PlannedFile] = ()
) -> Iterator[PartialFiles]:
    """Make a directory with the planned files, which becomes `out_dir` at the end of the block.

    After an error nothing remains, and an earlier directory `out_dir` is still there. Leftovers of
    a killed process stay hidden, and the next process begins anew.
    Errors: `UserError` for an `OSError` inside, `FullDiskError` for a full disk; `UserError` if
    another process writes there.
    """
    hidden = partial_dir(out_dir)
    data, replaced, old = hidden / "data", hidden / "replaced", hidden / "old"
    try:
        with _locked(hidden, out_dir):
            # An earlier process may have ended between the two renames.
            put_back(replaced, out_dir)
            remove(data, quietly=True)
            data.mkdir()
            try:
                # All files are closed before `data` is removed: NFS removes no open file.
                with _open_files(data, planned) as files:
                    yield PartialFiles(data, files)
                    for file in files.values():
                        file.sync()
                publish(data, out_dir, replaced)
            finally:
                remove(data, quietly=True)  # after an error; else it is `out_dir` now
                # Renamed first: a kill amid the deletion would leave a part of it, which
                # `put_back` must not find.
                if replaced.exists():
                    put_aside(replaced, old)
                remove(old, quietly=True)
    except OSError as error:
        kind = FullDiskError if full_disk_behind(error) else UserError
        raise kind(
            f"{out_dir} could not be written: {error.strerror or error} "
            f"({error.filename or hidden}); nothing was left behind"
        ) from None


@contextmanager
def _open_files(
    data: Path, planned: Sequence[PlannedFile]
) -> Iterator[dict[str, LargeFile]]:
    """Create the planned files with their constants in the directory `data`, and close them
    afterwards.
    """
    with ExitStack() as to_close:
        files = {}
        for plan in planned:
            file = LargeFile(data / plan.name, plan.num_bytes)
            files[plan.name] = to_close.enter_context(closing(file))
            for offset, content in plan.constants:
                file.write(content, offset)
        yield files


@contextmanager
def _locked(hidden: Path, out_dir: Path) -> Iterator[None]:
    """Create the directory `hidden` and lock it for this process; remove it afterwards if empty.

    A killed process releases the lock. Errors: `OSError`; `UserError` if another process holds it.
    """
    hidden.mkdir(parents=True, exist_ok=True)
    lock = FileLock(hidden / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{out_dir} is being written by another process; wait for it, or choose another "
            "directory"
        ) from None
    try:
        yield
    finally:
        (hidden / "lock").unlink(missing_ok=True)  # NFS removes it when it is closed
        lock.release()
        # It is not empty if another process begins anew, or NFS keeps an open file in it.
        with suppress(OSError):
            hidden.rmdir()
