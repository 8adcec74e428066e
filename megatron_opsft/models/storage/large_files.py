"""Read and write large files in pieces, by several threads at a time."""

import mmap
import os
import threading
from pathlib import Path

from megatron_opsft.runtime.durable import write_at

PAGE = 4096  # the fewest bytes that a disk reads or writes


class Staging(threading.local):
    """A buffer that each thread uses again and again: fresh pages cost more than copying does."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGE)

    def place_for(self, num_bytes: int) -> memoryview:
        """Return memory that begins at a page; it is valid until the thread's next call."""
        if num_bytes > len(self._memory):
            self._memory = mmap.mmap(-1, num_bytes)
        return memoryview(self._memory)[:num_bytes]


def read_into(memory: memoryview, path: Path, offset: int) -> None:
    """Fill the memory with bytes of a file from `offset` on. Errors: `OSError`, `EOFError`."""
    file = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < len(memory):
            num_bytes = os.preadv(file, [memory[done:]], offset + done)
            if num_bytes == 0:
                raise EOFError(f"it ends at byte {offset + done}")
            done += num_bytes
    finally:
        os.close(file)


class LargeFile:
    """A file of known size, whose pieces several threads may write at a time."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """Create the file, or open it with its content, and make it `num_bytes` long."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._file, num_bytes)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write bytes at `offset`. The disk begins at once, while the caller makes more."""
        write_at(self._file, memoryview(data), offset)
        if hasattr(os, "posix_fadvise"):
            # DONTNEED makes Linux write new pages now; those being written stay in its cache.
            os.posix_fadvise(self._file, offset, len(data), os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Wait until everything is on disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; `sync` must be called before if the data has to be on disk."""
        os.close(self._file)
