"""What stands at the output directory of a conversion, and whether there is room for its result."""

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path

from megatron_opsft.errors import UserError
from megatron_opsft.storage.file_layout import FileLayout
from megatron_opsft.storage.known_files import RECORD_NAME
from megatron_opsft.storage.partial import PartialDir


def in_words(num_bytes: float) -> str:
    """Such as `15.23 GB`, `3.4 MB` or `812 bytes`."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.2f} GB"
    if num_bytes >= 1e5:
        return f"{num_bytes / 1e6:.1f} MB"
    return f"{num_bytes:,.0f} bytes"


class Output:
    """The directory `out_dir`, compared with what a conversion would write there.

    record: content of the file that tells results of different conversions apart.
    """

    def __init__(self, out_dir: Path, layout: FileLayout, identity: dict[str, object]) -> None:
        """identity: two conversions with equal ones write the same bytes."""
        self.out_dir, self._layout = out_dir, layout
        digests = {
            n: hashlib.sha256(content).hexdigest() for n, content in layout.small_files.items()
        }
        self.record = (json.dumps(identity | {"sha256": digests}, indent=1) + "\n").encode()

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
        return record.is_file() and record.read_bytes() == self.record

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

    def check_room(self) -> None:
        """Errors: `UserError` when the disk has too little room for the result."""
        needed = sum(file.num_bytes for file in self._layout.files)
        free = shutil.disk_usage(self.out_dir.parent).free
        if needed > free:
            raise UserError(
                f"{self.out_dir} needs {in_words(needed)}, but its disk has {in_words(free)} left; "
                "free some or choose another place"
            )

    def remove_leftovers(self) -> None:
        """The result is there: remove what a killed try of this or another conversion left.

        Nothing is done while another process is writing.
        """
        partial = PartialDir(self.out_dir)
        if partial.path.is_dir():
            with suppress(UserError, OSError):
                partial.lock()
                partial.remove()
