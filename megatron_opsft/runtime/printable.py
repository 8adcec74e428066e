"""Text of others, such as problems, responses, ids and file names, made safe to be shown."""

import re

# What moves the cursor, sets titles or colours, or turns the direction of writing; and halves of
# surrogate pairs, as of file names that are not UTF-8, which cannot be written at all.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with every character that a terminal would obey as its escape: ESC as `\\x1b`.

    Tabs and line breaks stay.
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
