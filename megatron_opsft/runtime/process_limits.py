"""Errors that are the fault of how this process was started: too little address space, and a locale
that cannot express a name.
"""

import resource
from collections.abc import Sequence

from megatron_opsft.errors import UserError

# Of the C library, of the loader and of Python, whichever asked for memory first.
_NO_SPACE = (
    "failed to map segment",
    "Resource temporarily unavailable",
    "annot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "bad_alloc",
)
_LOCALE = "under this locale (see `locale`): set LC_ALL=C.UTF-8, or PYTHONUTF8=1"


def check_arguments(arguments: Sequence[str]) -> None:
    """Errors: `UserError` for an argument that is no text in this locale."""
    for argument in arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise UserError(f"argument {argument!r} is no text {_LOCALE}")


def fault_of_start(error: BaseException) -> str | None:
    """What to change about the start, if that is what an error comes from."""
    if isinstance(error, UnicodeEncodeError) and error.encoding != "utf-8":
        return f"{error.object!r} cannot be written {_LOCALE}"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    if isinstance(error, MemoryError) or any(text in str(error) for text in _NO_SPACE):
        return (
            f"this process may have {limit >> 20} MiB of address space, which is too little "
            "(ulimit -v): raise the limit, or lift it with `ulimit -v unlimited`"
        )
    return None
