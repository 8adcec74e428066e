"""A bar of a piece of work on a terminal, lines elsewhere, and what is logged meanwhile."""

import io
import logging
import sys

import pytest
from rich.console import Console

from megatron_opsft.cli import _ToStderr
from megatron_opsft.runtime import progress
from megatron_opsft.runtime.progress import Progress


def test_a_bar_on_a_terminal_with_log_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich prints what is written to `sys.stderr` above a bar that is shown."""
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=100, height=30)
    monkeypatch.setattr(progress, "Console", lambda stderr: console)
    handler = _ToStderr()
    record = logging.LogRecord("a", logging.INFO, "", 0, "seen above", None, None)
    with pytest.raises(KeyboardInterrupt), Progress("copying", 4000) as bar:
        bar.advance(2500)
        handler.handle(record)
        raise KeyboardInterrupt
    received = terminal.getvalue()
    assert "2,500/4,000" in received and received.count("seen above\n") == 1
    assert received.count("\x1b[?25l") == 1 and received.rstrip().endswith("\x1b[?25h")  # cursor
    other = io.StringIO()
    monkeypatch.setattr(sys, "stderr", other)
    handler.handle(record)
    assert other.getvalue() == "seen above\n"


def test_work_is_a_line_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("copying", 4, shown=False) as hidden:
        hidden.advance(4)
    with Progress("copying", 4) as quick:
        quick.advance(4)
    for name in ("LINES", "LOOKS"):
        monkeypatch.setattr(progress, f"_SECONDS_BETWEEN_{name}", 0)
    with Progress("model", 4, done=1, read=lambda: (3, "samples, right")) as slow:
        slow.look()
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("copying: 4 of 4 (")
    assert second == "model: 3 of 4 samples, right, about 0 s left" == third
