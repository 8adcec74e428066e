"""Bars of a run on a terminal, and what else is printed meanwhile."""

import io
import logging
import re
import sys
import time

import pytest
from rich.console import Console

from megatron_opsft.cli import _ToStderr
from megatron_opsft.run.progress import RunProgress, sparkline
from megatron_opsft.runtime import progress
from megatron_opsft.runtime.phase import count_done, enter_phase, expect, heartbeat
from megatron_opsft.runtime.progress import Progress


def shown(bars: RunProgress) -> list[str]:
    """What a terminal would show now, a string a line."""
    console = Console(file=io.StringIO(), width=100)
    console.print(bars.view())
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def made_step(step: int, mean_tokens: float) -> dict[str, float | int]:
    return {
        "step": step,
        "step_seconds": 2.5,
        "mean_response_tokens": mean_tokens,
        "num_rollouts": 16,
        "num_accepted": 6,
        "accuracy": 0.5,
    }


def test_a_second_bar_counts_the_responses_of_the_phase() -> None:
    bars = RunProgress(Console(file=io.StringIO(), force_terminal=True), steps=24, done=2)
    enter_phase("prepare", 3)
    line, phase = shown(bars)
    assert line.startswith("step 2/24 ") and " -, left" in line
    assert phase == "prepare 0:00:00"
    enter_phase("rollout")
    expect(512, "responses")
    count_done(128)
    _, inner = shown(bars)
    assert inner.startswith("rollout 128/512 ") and "responses, left" in inner
    enter_phase("evaluate")
    expect(64, "responses")
    assert shown(bars)[1].startswith("evaluate 0/64 ")
    enter_phase("record")
    bars.finish_step(made_step(3, 40.0))
    line, phase, numbers, lengths = shown(bars)
    assert line.startswith("step 3/24 ") and "2.50 s/step, left" in line
    assert phase == "record 0:00:00"
    assert numbers == "256 tokens/s accepted 6/16 accuracy 0.500"
    assert lengths == "mean tokens ▁ 40.0"


def test_a_log_line_goes_above_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich prints what is written to `sys.stderr` above a bar that is shown."""
    terminal = io.StringIO()
    handler = _ToStderr()
    with RunProgress(Console(file=terminal, force_terminal=True), steps=1, done=0):
        record = logging.LogRecord("a", logging.INFO, "", 0, "seen above", None, None)
        handler.handle(record)
    assert terminal.getvalue().count("seen above\n") == 1
    other = io.StringIO()
    monkeypatch.setattr(sys, "stderr", other)
    handler.handle(record)
    assert other.getvalue() == "seen above\n"


@pytest.mark.parametrize(
    ("is_terminal", "kind", "lines"), [(True, "xterm", 0), (True, "dumb", 1), (False, "xterm", 1)]
)
def test_a_line_in_place_of_the_bar_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_terminal: bool,
    kind: str,
    lines: int,
) -> None:
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    enter_phase("rollout", 1)
    expect(8, "responses")
    with caplog.at_level(logging.INFO), heartbeat(every_seconds=0.2):
        time.sleep(0.35)
    assert [r.getMessage().split(",")[-1] for r in caplog.records] == [
        " 0 of 8 responses on this rank"
    ] * lines


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
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif sign:
            lines[row] = lines[row][:column].ljust(column) + sign + lines[row][column + 1 :]
            column += 1
    return [" ".join(line.split()) for line in lines if line.strip()]


def terminal_of(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=30)


def received_by(terminal: Console) -> str:
    assert isinstance(terminal.file, io.StringIO)
    return terminal.file.getvalue()


@pytest.mark.parametrize("width", [100, 8])
def test_made_up_steps_on_a_screen_and_the_cursor_after_ctrl_c(width: int) -> None:
    terminal = terminal_of(width)
    enter_phase("prepare", 1)
    with pytest.raises(KeyboardInterrupt), RunProgress(terminal, steps=8, done=0) as view:
        for step, tokens in enumerate((80.0, 60.0, 70.0, 10.0), start=1):
            enter_phase("rollout", step)
            expect(16, "responses")
            count_done(16)
            time.sleep(0.15)
            enter_phase("train")
            view.finish_step(made_step(step, tokens))
            time.sleep(0.15)
        raise KeyboardInterrupt
    received = received_by(terminal)
    assert received.count("\x1b[?25l") == 1 and received.rstrip().endswith("\x1b[?25h")
    lines = screen_of(received)
    assert len(lines) == 4 and all(len(line) <= width for line in lines)
    if width == 100:
        assert lines[0].startswith("step 4/8 ") and "2.50 s/step, left 0:00:0" in lines[0]
        assert lines[1] == "train 0:00:00"
        assert lines[2] == "64 tokens/s accepted 6/16 accuracy 0.500"
        assert lines[3] == "mean tokens █▆▇▁ 10.0"


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


def test_work_is_a_bar_on_a_terminal() -> None:
    terminal = terminal_of(100)
    with Progress("copying", 4000, console=terminal) as bar:
        bar.advance(2500)
    assert screen_of(received_by(terminal))[0].startswith("copying 2,500/4,000 ")


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0]) == "▁▁"
