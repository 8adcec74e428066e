"""What trainer and engine process say to each other: pickled, over a socket file that only this
user can open; from another node through its host, encrypted and with the job's token.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Kinds of reply: still at work, some responses of a stream, the result, or an error that
    another start would not fix.
    """

    ALIVE = "alive"
    ENDED = "ended"
    RESULT = "result"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """A method of `process.Service` and its arguments."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """Any number of ALIVE, in a stream of ENDED (value: problem, sample index and token ids of
    each), then one RESULT or ERROR (value: the message), for each request but `add`.
    """

    kind: Kind
    value: Any = None
