"""Bars of a run on a terminal, and what else is printed meanwhile."""

import io
import logging
import os
import pty
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from rich.console import Console

from megatron_opsft.cli import _ToStderr
from megatron_opsft.run.progress import StepBars
from megatron_opsft.runtime.heartbeat import heartbeat
from megatron_opsft.runtime.phase import count_done, enter_phase, expect


def shown(bars: StepBars) -> list[str]:
    """What a terminal would show now, a string a line."""
    console = Console(file=io.StringIO(), width=100)
    console.print(bars.get_renderable())
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_a_second_bar_counts_the_responses_of_the_phase() -> None:
    bars = StepBars(Console(file=io.StringIO()), steps=24, done=2)
    enter_phase("prepare", 3)
    (line,) = shown(bars)
    assert line.startswith("step 2/24 ") and "- s/step, left" in line
    enter_phase("rollout")
    expect(512, "responses")
    count_done(128)
    _, inner = shown(bars)
    assert inner.startswith("rollout 128/512 ") and "responses, left" in inner
    enter_phase("evaluate")
    expect(64, "responses")
    assert shown(bars)[1].startswith("evaluate 0/64 ")
    enter_phase("record")
    bars.finish_step(3, 2.5)
    (line,) = shown(bars)
    assert line.startswith("step 3/24 ") and "2.50 s/step, left" in line


def test_a_log_line_goes_above_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich prints what is written to `sys.stderr` above a bar that is shown."""
    terminal = io.StringIO()
    handler = _ToStderr()
    with StepBars(Console(file=terminal, force_terminal=True), steps=1, done=0):
        record = logging.LogRecord("a", logging.INFO, "", 0, "seen above", None, None)
        handler.handle(record)
    assert terminal.getvalue().count("seen above\n") == 1
    other = io.StringIO()
    monkeypatch.setattr(sys, "stderr", other)
    handler.handle(record)
    assert other.getvalue() == "seen above\n"


@pytest.mark.parametrize(("is_terminal", "lines"), [(True, 0), (False, 1)])
def test_a_line_in_place_of_the_bar_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_terminal: bool,
    lines: int,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    enter_phase("rollout", 1)
    expect(8, "responses")
    with caplog.at_level(logging.INFO), heartbeat(every_seconds=0.2):
        time.sleep(0.35)
    assert [r.getMessage().split(",")[-1] for r in caplog.records] == [
        " 0 of 8 responses on this rank"
    ] * lines


class Terminal:
    """A pseudo-terminal whose screen can be read: what rich sends of cursor moves is obeyed."""

    def __init__(self, width: int = 100) -> None:
        self._ours, theirs = pty.openpty()
        self.file = open(theirs, "w", encoding="utf-8")  # noqa: SIM115
        assert self.file.isatty()
        self.console = Console(file=self.file, width=width, height=30)
        self._received = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the other end is closed
            while data := os.read(self._ours, 65536):
                self._received += data

    def close(self) -> str:
        """All that was received, when nothing more will come."""
        self.file.close()
        self._reader.join(10)
        os.close(self._ours)
        return self._received.decode("utf-8")


def screen_of(received: str) -> list[str]:
    """The lines of a screen after that."""
    lines, row, column = [""], 0, 0
    for code, sign in re.findall(r"\x1b\[([?0-9;]*[A-Za-z])|([^\x1b])", received):
        if code.endswith("A"):
            row -= int(code[:-1] or 1)
        elif code == "2K":
            lines[row] = ""
        elif sign == "\r":
            column = 0
        elif sign == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif sign:
            lines[row] = lines[row][:column].ljust(column) + sign + lines[row][column + 1 :]
            column += 1
    return [" ".join(line.split()) for line in lines if line.strip()]


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.file.close()


def test_a_phase_may_begin_while_the_bars_are_shown(terminal: Terminal) -> None:
    """A task that is added to a `Progress` draws it, and so would add another without end."""
    enter_phase("prepare", 1)
    with StepBars(terminal.console, steps=4, done=0) as bars:
        enter_phase("rollout")
        expect(16, "responses")
        count_done(4)
        bars.refresh()
        enter_phase("evaluate")
        expect(8, "responses")
        bars.refresh()
    received = terminal.close()
    assert "rollout" in received
    above, below = screen_of(received)[:2]
    assert above.startswith("step 0/4 ") and below.startswith("evaluate 0/8 ")
    assert received.endswith("\x1b[?25h")
