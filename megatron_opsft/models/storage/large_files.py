"""Large files, read and written in pieces by several threads at a time."""

import mmap
import os
import threading
from pathlib import Path

from megatron_opsft.runtime.durable import write_at

PAGE = 4096  # bytes that a disk reads and writes at least


class Staging(threading.local):
    """Memory that each thread uses again and again: fresh pages cost more than the copying."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGE)

    def place_for(self, num_bytes: int) -> memoryview:
        """Memory that begins at a page; valid until the thread's next call."""
        if num_bytes > len(self._memory):
            self._memory = mmap.mmap(-1, num_bytes)
        return memoryview(self._memory)[:num_bytes]


def read_into(place: memoryview, path: Path, offset: int) -> None:
    """Fill the place with a file's bytes. Errors: `OSError`, `EOFError`."""
    file = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < len(place):
            read = os.preadv(file, [place[done:]], offset + done)
            if read == 0:
                raise EOFError(f"it ends at byte {offset + done}")
            done += read
    finally:
        os.close(file)


class LargeFile:
    """A file of known size, whose pieces several threads may write at a time."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """Create the file, or keep what it holds; either way it has `num_bytes` then."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._file, num_bytes)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Put bytes in their place. The disk begins at once, while the next ones are made."""
        write_at(self._file, memoryview(data), offset)
        if hasattr(os, "posix_fadvise"):
            # "Not needed" makes Linux write what is new; pages on their way stay in its cache.
            os.posix_fadvise(self._file, offset, len(data), os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Wait until everything is on disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Without a sync."""
        os.close(self._file)
