"""Bars on a terminal: the steps of a run and, below, the responses of the phase that is on."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from megatron_opsft.runtime.phase import Count, current_count, current_phase


class StepBars(Progress):
    """What is counted within a phase is counted on this rank: the others are about as far."""

    def __init__(self, console: Console, *, steps: int, done: int) -> None:
        self._seen: Count | None = None
        self._inner: TaskID | None = None
        super().__init__(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[about]}, left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._steps = self.add_task("step", total=steps, completed=done, about="- s/step")

    def finish_step(self, step: int, seconds: float) -> None:
        """Show that so many steps are done, and what the last one took."""
        self.update(self._steps, completed=step, about=f"{seconds:.2f} s/step")

    def get_renderables(self) -> Iterable[RenderableType]:
        """Called several times a second."""
        self._follow_phase()
        return super().get_renderables()

    def _follow_phase(self) -> None:
        """A bar for what is being counted; none where nothing is."""
        count = current_count()
        if count is not self._seen and self._inner is not None:
            self.remove_task(self._inner)
            self._inner = None
        if self._inner is None and count.total:
            name = current_phase().name
            self._inner = self.add_task(name, total=count.total, about=count.what)
        if self._inner is not None:
            self.update(self._inner, completed=count.done)
        self._seen = count
