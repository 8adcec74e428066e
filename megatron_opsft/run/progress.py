"""A run on a terminal: its steps, the phase that is on, and the numbers of its last steps."""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from rich.console import Console, RenderableType
from rich.text import Text

from megatron_opsft.runtime.phase import Count, current_count, current_phase
from megatron_opsft.runtime.progress import Progress, bars

_BLOCKS = "▁▂▃▄▅▆▇█"
_NUM_LENGTHS = 32  # steps whose mean lengths are shown
_STEP_PERIOD = 1800.0  # seconds: the time left goes by the steps finished in so many


class RunProgress(Progress):
    """What is counted within a phase is counted on this rank: the others are about as far."""

    def __init__(self, console: Console, *, steps: int, done: int) -> None:
        self._seen: Count | None = None
        self._last: Mapping[str, float | int] = {"step": done}
        self._lengths: deque[float] = deque(maxlen=_NUM_LENGTHS)
        self._inner = bars()
        super().__init__(
            "step", steps, done=done, read=self._steps, console=console, period=_STEP_PERIOD
        )

    def finish_step(self, metrics: Mapping[str, float | int]) -> None:
        """Show a finished step: its line of metrics.jsonl."""
        self._last = metrics
        self._lengths.append(metrics["mean_response_tokens"])
        self._show()

    def _steps(self) -> tuple[int, str]:
        seconds = self._last.get("step_seconds")
        return int(self._last["step"]), "-" if seconds is None else f"{seconds:.2f} s/step"

    def _below(self) -> Sequence[RenderableType]:
        """Called several times a second."""
        self._follow_phase()
        lines: list[RenderableType] = [self._inner]
        if not self._inner.task_ids:
            phase = current_phase()
            seconds = timedelta(seconds=int(time.monotonic() - phase.entered))
            lines = [_line(f"{phase.name}  {seconds}")]
        if self._lengths:
            lines.append(_line(_numbers(self._last)))
            blocks = "" if self.console.options.ascii_only else f"{sparkline(self._lengths)} "
            lines.append(_line(f"mean tokens  {blocks}{self._lengths[-1]:.1f}"))
        return lines

    def _follow_phase(self) -> None:
        """A bar for what is being counted; none where nothing is."""
        count = current_count()
        if count is not self._seen:
            self._inner = bars()
            if count.total:
                self._inner.add_task(current_phase().name, total=count.total, count="", about="")
            self._seen = count
        for task in self._inner.task_ids:
            rate = "" if count.done else count.describe_rate(time.monotonic())
            done = f"{count.done}/{count.total}"
            about = f"{count.what}{rate}"
            self._inner.update(task, completed=count.done, count=done, about=about)


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
