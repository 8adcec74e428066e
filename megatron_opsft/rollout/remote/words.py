"""What a trainer rank and the host of an engine say to each other, beside what is passed on."""

from enum import Enum


class Word(bytes, Enum):
    """The trainer's: OPEN (start an engine process), REQUEST (its content goes to that process),
    CLOSE. The host's: OPENED (content: process id), BUSY (with another trainer), REPLY (content:
    from the process), ENDED (content: how the process ended), THERE (nothing).
    """

    OPEN = b"open"
    REQUEST = b"request"
    CLOSE = b"close"
    OPENED = b"opened"
    BUSY = b"busy"
    REPLY = b"reply"
    ENDED = b"ended"
    THERE = b"there"
