"""Bars of a run on a terminal, and what else is printed meanwhile."""

import io
import logging
import sys
import time

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
