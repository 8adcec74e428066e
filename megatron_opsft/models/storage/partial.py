"""The hidden directory in which an output is written by one process, before it appears.

Beside `NAME` stands `.NAME.partial/`: `data/` becomes the output, `lock` is held by whoever writes
it, `replaced/` is what had the name before, for the moment between two renames, `old/` the same
while it is being deleted: only what is whole is ever given a name back.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

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
    """Where an output is written before it appears."""
    return out_dir.parent / f".{out_dir.name}.partial"


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A large file: its size and the bytes between the tensors, as (offset, bytes)."""

    name: str
    num_bytes: int
    constants: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class PartialFiles:
    """What is written of an output. files: the large ones, by name."""

    directory: Path
    files: dict[str, LargeFile]


@contextmanager
def written_whole(
    out_dir: Path, planned: Sequence[PlannedFile] = ()
) -> Iterator[PartialFiles]:
    """A directory with the planned files alone, which is `out_dir` after the block; after an error
    nothing is left, and what had the name before still has it.

    What a killed process leaves stays hidden, and the next one begins anew.
    Errors: `UserError` for an `OSError` inside, `FullDiskError` for a full disk; `UserError` where
    another process writes there.
    """
    place = partial_dir(out_dir)
    data, replaced, old = place / "data", place / "replaced", place / "old"
    try:
        with _held(place, out_dir):
            put_back(
                replaced, out_dir
            )  # the try before may have ended between two renames
            remove(data, quietly=True)
            data.mkdir()
            try:
                with (
                    ExitStack() as opened
                ):  # on NFS files that are open cannot be removed
                    files = {}
                    for each in planned:
                        file = LargeFile(data / each.name, each.num_bytes)
                        files[each.name] = opened.enter_context(closing(file))
                        for offset, content in each.constants:
                            file.write(content, offset)
                    yield PartialFiles(data, files)
                    for file in files.values():
                        file.sync()
                publish(data, out_dir, replaced)
            finally:
                remove(data, quietly=True)
                if replaced.exists():
                    put_aside(replaced, old)
                remove(old, quietly=True)
    except OSError as error:
        kind = FullDiskError if full_disk_behind(error) else UserError
        raise kind(
            f"{out_dir} could not be written: {error.strerror or error} "
            f"({error.filename or place}); nothing was left behind"
        ) from None


@contextmanager
def _held(place: Path, out_dir: Path) -> Iterator[None]:
    """Hold the directory `place` for this process alone, and remove it afterwards if it is empty. A
    kill releases it. Errors: `OSError`; `UserError` where another process holds it.
    """
    place.mkdir(parents=True, exist_ok=True)
    lock = FileLock(place / "lock", timeout=0)
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
        (place / "lock").unlink(missing_ok=True)  # on NFS it goes when it is closed
        lock.release()
        with suppress(
            OSError
        ):  # another process begins anew there, or holds a file of it
            place.rmdir()
