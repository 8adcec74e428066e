"""Bars on a terminal: the steps of a run and, below, the responses of the phase that is on."""

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from megatron_opsft.runtime.phase import Count, current_count, current_phase


class StepBars(Live):
    """What is counted within a phase is counted on this rank: the others are about as far.

    The bars are drawn by this display and never started themselves: a started one is drawn anew by
    every task that it is given, and that while it is being drawn.
    """

    def __init__(self, console: Console, *, steps: int, done: int) -> None:
        self._seen: Count | None = None
        self._bars, self._inner = _bars(), _bars()
        self._steps = self._bars.add_task("step", total=steps, completed=done, about="- s/step")
        super().__init__(console=console, refresh_per_second=10, get_renderable=self._view)

    def finish_step(self, step: int, seconds: float) -> None:
        """Show that so many steps are done, and what the last one took."""
        self._bars.update(self._steps, completed=step, about=f"{seconds:.2f} s/step")

    def _view(self) -> RenderableType:
        """Called several times a second."""
        self._follow_phase()
        return Group(self._bars, self._inner) if self._inner.task_ids else self._bars

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
            self._inner.update(task, completed=count.done)


def _bars() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[about]}, left"),
        TimeRemainingColumn(),
    )
