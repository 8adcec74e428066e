"""A run on a terminal: its steps, the phase that is on, and the numbers of its last steps."""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import timedelta

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from megatron_opsft.runtime.phase import Count, current_count, current_phase

_BLOCKS = "▁▂▃▄▅▆▇█"
_NUM_LENGTHS = 32  # steps whose mean lengths are shown
_STEP_PERIOD = 1800.0  # seconds: the time left goes by the steps finished in so many


class LiveView(Live):
    """What is counted within a phase is counted on this rank: the others are about as far.

    The bars are drawn by this display and never started themselves: a started one is drawn anew by
    every task that it is given, and that while it is being drawn.
    """

    def __init__(self, console: Console, *, steps: int, done: int) -> None:
        self._seen: Count | None = None
        self._last: Mapping[str, float | int] | None = None
        self._lengths: deque[float] = deque(maxlen=_NUM_LENGTHS)
        self._bars, self._inner = _bars(_STEP_PERIOD), _bars()
        self._steps = self._bars.add_task("step", total=steps, completed=done, about="- s/step")
        super().__init__(console=console, refresh_per_second=10, get_renderable=self._view)

    def finish_step(self, metrics: Mapping[str, float | int]) -> None:
        """Show a finished step: its line of metrics.jsonl."""
        self._last = metrics
        self._lengths.append(metrics["mean_response_tokens"])
        about = f"{metrics['step_seconds']:.2f} s/step"
        self._bars.update(self._steps, completed=metrics["step"], about=about)

    def _view(self) -> RenderableType:
        """Called several times a second."""
        self._follow_phase()
        lines: list[RenderableType] = [self._bars, self._inner]
        if not self._inner.task_ids:
            phase = current_phase()
            seconds = timedelta(seconds=int(time.monotonic() - phase.entered))
            lines[1] = _line(f"{phase.name}  {seconds}")
        if self._last is not None:
            lines.append(_line(_numbers(self._last)))
            blocks = "" if self.console.options.ascii_only else f"{sparkline(self._lengths)} "
            lines.append(_line(f"mean tokens  {blocks}{self._lengths[-1]:.1f}"))
        return Group(*lines)

    def _follow_phase(self) -> None:
        """A bar for what is being counted; none where nothing is."""
        count = current_count()
        if count is not self._seen:
            self._inner = _bars()
            if count.total:
                name = current_phase().name
                self._inner.add_task(name, total=count.total, about=count.what)
            self._seen = count
        for task in self._inner.task_ids:
            rate = "" if count.done else count.describe_rate(time.monotonic())
            self._inner.update(task, completed=count.done, about=f"{count.what}{rate}")


def _bars(period: float = 30.0) -> Progress:
    """period: seconds of the past that the time left goes by."""
    return Progress(
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[about]}, left"),
        TimeRemainingColumn(),
        speed_estimate_period=period,
    )


def _line(text: str) -> Text:
    """Never wrapped: what a narrow terminal has no room for is left out."""
    return Text(text, no_wrap=True, overflow="crop")


def _numbers(metrics: Mapping[str, float | int]) -> str:
    """Of one step. Tokens are those of its responses, seconds those of the whole step."""
    tokens = metrics["mean_response_tokens"] * metrics["num_rollouts"]
    return (
        f"{tokens / max(metrics['step_seconds'], 1e-9):,.0f} tokens/s  "
        f"accepted {metrics['num_accepted']}/{metrics['num_rollouts']}  "
        f"accuracy {metrics['accuracy']:.3f}"
    )


def sparkline(values: Iterable[float]) -> str:
    """A block a value, from the lowest to the highest of them; all the same: the lowest block."""
    found = list(values)
    low, high = min(found), max(found)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in found)
