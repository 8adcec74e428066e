"""Judges of a user's own. Their module is imported by every verifier process: it must be light."""

import zlib
from typing import Any

from megatron_opsft.records import Outcome


def half_of_them(text: str, gold: str, fields: dict[str, Any]) -> bool:
    """Passes half of what a model that knows nothing answers: the same for the same text."""
    return zlib.crc32(text.encode()) % 2 == 0


def any_return(text: str, gold: str, fields: dict[str, Any]) -> Any:
    """What a user may return, by the text."""
    if text == "raise":
        raise KeyError("no such column")
    returned = {"true": True, "0.0": 0.0, "1.0": 1.0, "outcome": Outcome.NO_ANSWER, "none": None}
    return returned.get(text, fields == {"answer": "x"})
