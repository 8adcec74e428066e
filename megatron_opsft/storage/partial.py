"""The hidden directory in which an output is written by one process, before it appears.

Beside `NAME` stands `.NAME.partial/`: `data/` becomes the output, `lock` is held by whoever writes
it, `replaced/` is what had the name before, for the moment between two renames.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import publish, put_back, remove, write_bytes
from megatron_opsft.storage.direct_io import DirectFile
from megatron_opsft.storage.file_layout import PlannedFile


def partial_dir(out_dir: Path) -> Path:
    """Where an output is written before it appears."""
    return out_dir.parent / f".{out_dir.name}.partial"


class PartialDir:
    """`partial_dir` of an output; nothing of it may be touched but between lock and unlock.

    files: the large files of the output while they are open, by name.
    """

    def __init__(self, out_dir: Path) -> None:
        self.out_dir = Path(out_dir)
        self.path = partial_dir(self.out_dir)
        self.data = self.path / "data"
        self._lock_path = self.path / "lock"
        self._replaced = self.path / "replaced"
        self._lock: int | None = None
        self.files: dict[str, DirectFile] = {}

    def lock(self) -> None:
        """Make the directory and hold it; a kill lets go of it.

        Errors: `OSError`; `UserError` where another process holds it.
        """
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # who held it before is just removing it
                handle = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o644)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.path.samestat(os.fstat(handle), os.stat(self._lock_path)):
                        break
                except BlockingIOError:
                    os.close(handle)
                    raise UserError(
                        f"{self.out_dir} is being written by another process; wait for it, or "
                        "choose another directory"
                    ) from None
                except BaseException:
                    os.close(handle)
                    raise
                os.close(handle)
        self._lock = handle
        put_back(self._replaced, self.out_dir)  # the try before may have ended between two renames

    def clear(self) -> None:
        """Remove everything but the lock."""
        for entry in self.path.iterdir():
            if entry != self._lock_path:
                remove(entry, quietly=True)

    def open_files(self, planned: Sequence[PlannedFile]) -> None:
        """Make the large files. `OSError`."""
        self.data.mkdir(exist_ok=True)
        for each in planned:
            file = self.files[each.name] = DirectFile(self.data / each.name, each.num_bytes)
            for offset, content in each.constants:
                file.write(content, offset)

    def write_small(self, files: Mapping[str, bytes]) -> None:
        """Files of the given relative names and contents. `OSError`, `FullDiskError`."""
        for name, content in files.items():
            (self.data / name).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self.data / name, content)

    def publish(self) -> None:
        """Give `data` its name, in the place of what has it, when all is on disk. `OSError`."""
        for file in self.files.values():
            file.sync()
        self.close_files()  # on NFS files that are open cannot be removed
        publish(self.data, self.out_dir, self._replaced)

    def close_files(self) -> None:
        """Without a sync."""
        while self.files:
            self.files.popitem()[1].close()

    def remove(self) -> None:
        """Remove it all and let go of the lock; what cannot be removed stays."""
        self.close_files()
        with suppress(OSError):
            self.clear()
            # Still held, so that nobody else begins to use it; on NFS it goes when it is closed.
            self._lock_path.unlink()
        self.unlock()
        with suppress(OSError):  # another process begins anew there, or holds a file of it
            self.path.rmdir()

    def unlock(self) -> None:
        """Leave everything as it is for the next try."""
        self.close_files()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextmanager
def written_whole(out_dir: Path) -> Iterator[PartialDir]:
    """An empty `PartialDir`, whose data is `out_dir` after the block; after an error nothing is
    left, and what had the name before still has it.

    What a killed process leaves stays hidden, and the next one begins anew.
    Errors: `UserError` for an `OSError` inside, and where another process writes there.
    """
    partial = PartialDir(out_dir)
    try:
        partial.lock()
        try:
            partial.clear()
            yield partial
            partial.publish()
        finally:
            partial.remove()
    except OSError as error:
        raise UserError(
            f"{out_dir} could not be written: {error.strerror or error} "
            f"({error.filename or partial.path}); nothing was left behind"
        ) from None
