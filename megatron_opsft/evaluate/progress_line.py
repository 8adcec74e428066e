"""How far the evaluation is: samples, running accuracy, tokens per second, time left."""

import sys
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_opsft.runtime.job import Job

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_LOOKS = 0.5


class Tally:
    """What all ranks stored since this start, counted in the job's store."""

    def __init__(self, job: Job, name: str) -> None:
        """name: of this part of the job."""
        self._job, self._name = job, name

    def add(self, *, samples: int, correct: int = 0, tokens: int) -> None:
        """Count these; samples last, so that none is counted without its tokens."""
        for what, number in (("correct", correct), ("tokens", tokens), ("done", samples)):
            self._job.add(f"{self._name}/{what}", number)

    def read(self) -> tuple[int, int, int]:
        """Samples, correct ones among them, and tokens; all only grow."""
        samples, correct, tokens = (
            self._job.add(f"{self._name}/{what}", 0) for what in ("done", "correct", "tokens")
        )
        return samples, correct, tokens


class ProgressLine:
    """One rank shows it on standard error: one living line on a terminal, else a line now and then.

    Use it in a `with`; `look` is cheap and may be called at every token.
    """

    def __init__(
        self, label: str, tally: Tally, *, shown: bool, total: int, done: int, correct: int
    ) -> None:
        """shown: on this rank. total: samples in all; done, correct: those of earlier starts."""
        self._label, self._tally, self._shown = label, tally, shown
        self._total, self._done, self._correct = total, done, correct
        self._start = self._last_look = self._last_line = time.monotonic()
        self._live: Live | None = None
        if shown and sys.stderr.isatty():
            self._live = Live(Text(""), console=Console(stderr=True), auto_refresh=False)

    def __enter__(self) -> "ProgressLine":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *unused: object) -> None:
        if self._shown:
            self._show(last=True)
        if self._live is not None:
            self._live.stop()

    def look(self) -> None:
        """Show what is new, if it is time."""
        if self._shown and time.monotonic() - self._last_look > _SECONDS_BETWEEN_LOOKS:
            self._last_look = time.monotonic()
            self._show()

    def _show(self, *, last: bool = False) -> None:
        due = last or time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES
        if self._live is not None:
            self._live.update(Text(self.line()), refresh=True)
        elif due:
            self._last_line = time.monotonic()
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """Such as `model: 512 of 4096 samples, accuracy 91.2 %, 7,100 tokens/s, 1:20 left`."""
        new, correct, tokens = self._tally.read()
        elapsed = time.monotonic() - self._start
        done = self._done + new
        parts = [f"{self._label}: {done:,} of {self._total:,} samples"]
        if done:
            parts.append(f"accuracy {100 * (self._correct + correct) / done:.1f} %")
        if new:
            parts.append(f"{tokens / elapsed:,.0f} tokens/s")
            if done < self._total:
                parts.append(f"about {_clock(elapsed / new * (self._total - done))} left")
        return ", ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
