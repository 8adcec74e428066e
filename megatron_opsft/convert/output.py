"""A directory that is written over any number of tries, and seen only when it is whole.

While it is being written there stands `.NAME.partial/` beside it (`storage.partial`), in which
`plan.json` says of which conversion it is, and `journal` names the tensors that are written. A try
that is killed is continued by the next one; another conversion starts anew.

What a killed process wrote is safe with the kernel, but not on disk before the final sync. So the
journal holds only until the machine starts anew (or another machine looks at it).
"""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_opsft.convert.progress import in_words
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import write_bytes
from megatron_opsft.storage.file_layout import FileLayout, Target
from megatron_opsft.storage.known_files import RECORD_NAME
from megatron_opsft.storage.partial import PartialDir

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Output:
    """Context manager of one try. `write` and `done` may be called by several threads."""

    def __init__(self, out_dir: Path, layout: FileLayout, record: dict[str, object]) -> None:
        """record: identifies the conversion; two with equal records write the same bytes.

        Errors, when it is entered: `UserError` when another process is writing `out_dir`, or when
        the disk has too little room.
        """
        self.out_dir, self._layout = Path(out_dir), layout
        self._record = json.dumps(record, indent=1) + "\n"
        digests = {
            n: hashlib.sha256(content).hexdigest() for n, content in layout.small_files.items()
        }
        self._final_record = json.dumps(record | {"sha256": digests}, indent=1) + "\n"
        self._partial = PartialDir(self.out_dir)
        self._data = self._partial.data
        self.finished: set[str] = set()
        self._journal_path = self._partial.path / "journal"
        self._journal: int | None = None

    def is_complete(self) -> bool:
        """Whether `out_dir` is already the result of this very conversion, with all its files."""
        return self._is_recorded() and not self._wrong_files()

    def explain_existing(self) -> None:
        """Errors: `UserError` when `out_dir` is another or a damaged conversion's result."""
        if self._is_recorded():
            name, size, planned = self._wrong_files()[0]
            raise UserError(
                f"{self.out_dir} is damaged: {name} has {size:,} bytes, not {planned:,}; give "
                "--overwrite to convert again"
            )
        if (self.out_dir / RECORD_NAME).is_file():
            raise UserError(
                f"{self.out_dir} already exists and is another conversion's result (of other files "
                "or settings, or by an earlier version); see what `convert check` says, choose "
                "another directory, or give --overwrite"
            )

    def _is_recorded(self) -> bool:
        record = self.out_dir / RECORD_NAME
        return record.is_file() and record.read_bytes() == self._final_record.encode()

    def _wrong_files(self) -> list[tuple[str, int, int]]:
        """(name, bytes, planned bytes) of files that are missing or have another size."""
        planned = {file.name: file.num_bytes for file in self._layout.files}
        planned |= {name: len(content) for name, content in self._layout.small_files.items()}
        found = {path.name: path.stat().st_size for path in self.out_dir.iterdir()}
        return [
            (name, found.get(name, 0), size)
            for name, size in planned.items()
            if found.get(name) != size
        ]

    def __enter__(self) -> Self:
        try:
            self._partial.lock()
            self._continue_or_begin()
            self._check_room()
            self._partial.open_files(self._layout.files)
        except OSError as error:
            self._close()
            raise self._unwritable(error) from None
        except BaseException:
            self._close()
            raise
        return self

    def write(self, target: Target, row: int, data: memoryview) -> None:
        """Put rows of a target in their place, from `row` on.

        data: bytes of the output's dtype, in `Staging.place_for` of their offset in the file.
        """
        region = target.region
        try:
            self._partial.files[str(region.path)].write_staged(data, region.offset_of(row))
        except OSError as error:
            raise self._unwritable(error) from None

    def done(self, target: Target) -> None:
        """All rows of the target are written."""
        line = f"{target.name}\n".encode()
        assert self._journal is not None
        os.write(self._journal, line)  # appends whole: lines of several threads do not mix

    def finish(self, side_files: dict[str, bytes]) -> None:
        """Everything is written: complete the directory and let it appear.

        side_files: name -> content of what comes along, such as tokenizer files.
        """
        record = {RECORD_NAME: self._final_record.encode()}
        try:
            self._partial.write_small(side_files | self._layout.small_files | record)
            try:
                self._partial.sync()
            except OSError:
                # What the kernel could not write it may have dropped, and would not report again.
                self._journal_path.unlink(missing_ok=True)
                raise
            self._close_journal()
            self._partial.publish()
        except OSError as error:
            raise self._unwritable(error) from None
        self._partial.remove()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def discard(self) -> None:
        """Remove what was written: it came from a source that turned out to be unusable."""
        self._close_journal()
        self._partial.remove()

    def remove_leftovers(self) -> None:
        """The result is there: remove what a killed try of this or another conversion left.

        Nothing is done while another process is writing.
        """
        if self._partial.path.is_dir():
            with suppress(UserError, OSError):
                self._partial.lock()
                self._partial.remove()

    def _close_journal(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None

    def _close(self) -> None:
        self._close_journal()
        self._partial.unlock()

    def _continue_or_begin(self) -> None:
        """Read the journal of a killed try of the same conversion, or clear what is there."""
        plan_file, journal = self._partial.path / "plan.json", self._journal_path
        now = self._record + _BOOT_ID.read_text() if _BOOT_ID.is_file() else self._record
        same = plan_file.is_file() and plan_file.read_text(encoding="utf-8") == now
        # Without the data the journal is one of a try that was killed after its result appeared.
        if same and self._data.is_dir():
            lines = journal.read_bytes().splitlines(keepends=True) if journal.is_file() else []
            self.finished = {line[:-1].decode() for line in lines if line.endswith(b"\n")}
        else:
            self._partial.clear()
            self._data.mkdir(exist_ok=True)
            write_bytes(plan_file, now.encode())
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self._journal, b"\n")  # ends a line that a kill cut

    def _check_room(self) -> None:
        there = sum(p.stat().st_blocks * 512 for p in self._data.glob("[!.]*"))
        needed = sum(file.num_bytes for file in self._layout.files) - there
        free = shutil.disk_usage(self._partial.path).free
        if needed > free:
            raise UserError(
                f"{self.out_dir} needs {in_words(needed)} more, but its disk has "
                f"{in_words(free)} left; free some or choose another place"
            )

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"{self.out_dir} could not be written: {error.strerror or error}; fix it and give the "
            f"same command to continue (what is done is kept in {self._partial.path})"
        )
