"""Large files read and written past the page cache, where the file system allows it.

A model that is converted goes through memory once. Through the page cache its bytes would be copied
once more, push everything else out of memory, and reach the disk late.
"""

import errno
import mmap
import os
import threading
from pathlib import Path

from megatron_opsft.runtime.durable import write_at

ALIGNMENT = 4096  # of memory, offsets and sizes of direct transfers; every common disk accepts it
_O_DIRECT = getattr(os, "O_DIRECT", 0)
# What file systems without direct transfers answer, when a file is opened or at the transfer.
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


class Staging(threading.local):
    """Memory that each thread uses again and again: fresh pages cost more than the copying."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, ALIGNMENT)

    def place_for(self, offset: int, num_bytes: int) -> memoryview:
        """Memory that lies to a page as `offset` does in a file; valid until the thread's next
        call.
        """
        phase = offset % ALIGNMENT
        return self._pages(phase + num_bytes)[phase : phase + num_bytes]

    def read(self, path: Path, offset: int, num_bytes: int) -> memoryview:
        """Bytes of a file; valid until the thread's next call. Errors: `OSError`, `EOFError`."""
        phase = offset % ALIGNMENT
        pages = self._pages(phase + num_bytes)
        try:
            _read_at(path, _O_DIRECT, pages, offset - phase, phase + num_bytes)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            _read_at(path, 0, pages, offset - phase, phase + num_bytes)
        return pages[phase : phase + num_bytes]

    def _pages(self, num_bytes: int) -> memoryview:
        """At least this many bytes, in whole pages."""
        rounded = num_bytes + -num_bytes % ALIGNMENT
        if rounded > len(self._memory):
            self._memory = mmap.mmap(-1, rounded)
        return memoryview(self._memory)[:rounded]


class DirectFile:
    """A file of known size; `write*` may be called by several threads, for separate places."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """Create the file, or keep what it holds; either way it has `num_bytes` then."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._file, num_bytes)
        self._direct: int | None = None
        try:
            self._direct = os.open(path, os.O_WRONLY | _O_DIRECT)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                self.close()
                raise

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Put bytes in their place, by way of the page cache."""
        write_at(self._file, memoryview(data), offset)

    def write_staged(self, data: memoryview, offset: int) -> None:
        """Put what is in `Staging.place_for(offset, ...)` in its place: whole pages directly."""
        first = min(-offset % ALIGNMENT, len(data))
        last = len(data) - (offset + len(data)) % ALIGNMENT
        if self._direct is None or first >= last:
            write_at(self._file, data, offset)
            return
        try:
            write_at(self._direct, data[first:last], offset + first)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            write_at(self._file, data[first:last], offset + first)
        write_at(self._file, data[:first], offset)
        write_at(self._file, data[last:], offset + last)

    def sync(self) -> None:
        """Wait until everything is on disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Without a sync."""
        for file in (self._file, self._direct):
            if file is not None:
                os.close(file)


def _read_at(path: Path, flags: int, pages: memoryview, offset: int, num_bytes: int) -> None:
    """At least `num_bytes`, as far as the file goes."""
    file = os.open(path, os.O_RDONLY | flags)
    try:
        done = 0
        while done < num_bytes:
            read = os.preadv(file, [pages[done:]], offset + done)
            if read == 0:
                raise EOFError(f"it ends at byte {offset + done}")
            done += read
    finally:
        os.close(file)
