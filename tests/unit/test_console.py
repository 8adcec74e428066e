"""What is written to a terminal: any text, to any stream, also to one that nobody reads."""

import errno
import io
import sys
from typing import Any

import pytest

from megatron_opsft.runtime.console import say

TEXT = "é – 你好 \x1b[31mred\r\u202e\ud83d\tend"


class Stream(io.TextIOWrapper):
    """Of an encoding; a terminal, or not."""

    def __init__(self, encoding: str, *, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    @property
    def text(self) -> str:
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("encoding", "written"),
    [
        ("utf-8", "é – 你好"),
        ("latin-1", "é \\u2013 \\u4f60\\u597d"),
        ("ascii", "\\xe9 \\u2013 \\u4f60\\u597d"),
    ],
)
def test_what_a_stream_cannot_show_and_a_terminal_would_obey_is_escaped(
    encoding: str, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    say(TEXT, dim=True)
    say("x", end="")
    assert stream.text == f"{written} \\x1b[31mred\\r\\u202e\\ud83d\tend\nx"


def test_a_sample_is_dim_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream("utf-8", is_terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    say("sample", dim=True, error=True)
    assert stream.text == "\x1b[2msample\x1b[0m\n"


class Failing(Stream):
    """One whose reader has gone, or whose disk is full."""

    def __init__(self, number: int) -> None:
        super().__init__("utf-8")
        self.number = number

    def write(self, text: Any) -> int:
        raise OSError(self.number, "failed")


def test_a_stream_without_a_reader_is_no_error_and_a_full_disk_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = Stream("utf-8")
    closed.close()
    for stream in (None, closed, Failing(errno.EPIPE), Failing(errno.EIO)):
        monkeypatch.setattr(sys, "stdout", stream)
        say("nobody")
    monkeypatch.setattr(sys, "stdout", Failing(errno.ENOSPC))
    with pytest.raises(OSError, match="failed"):
        say("full")
