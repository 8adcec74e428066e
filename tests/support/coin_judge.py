"""Judges that answers of a model which knows nothing pass or fail, by a digest of the text."""

import zlib


def half_of_them(text: str, gold: str, fields: dict) -> bool:
    """The same for the same text, whatever is asked."""
    return zlib.crc32(text.encode()) % 2 == 0
