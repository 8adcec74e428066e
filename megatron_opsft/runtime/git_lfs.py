"""Files that a clone without Git LFS leaves behind: a few lines that name the real file."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from megatron_opsft.errors import UserError

_FIRST_BYTES = b"version https://git-lfs.github.com/spec/"
_MAX_BYTES = 1024


def check_fetched(files: Iterable[Path]) -> None:
    """Errors: `UserError` for a file that is Git LFS's pointer to the real one."""
    for path in files:
        if _is_pointer(path):
            raise UserError(
                f"{path} is only Git LFS's pointer to the file: run `git lfs pull` in {path.parent}"
            )


def _is_pointer(path: Path) -> bool:
    """What cannot be read is left to whoever needs it."""
    with suppress(OSError):
        if path.is_file() and path.stat().st_size <= _MAX_BYTES:
            with path.open("rb") as file:
                return file.read(len(_FIRST_BYTES)) == _FIRST_BYTES
    return False
