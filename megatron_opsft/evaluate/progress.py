"""How far the evaluation is: samples, running accuracy, tokens per second, time left."""

import sys
import time
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_opsft.runtime.job import Job

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Names of the job's counters of what was stored since this start."""

    samples: str
    correct: str
    tokens: str

    @classmethod
    def of(cls, name: str) -> "Counted":
        """The counters of one part of a job, by its name."""
        return cls(samples=f"{name}/done", correct=f"{name}/correct", tokens=f"{name}/tokens")


class Progress:
    """Rank 0 shows it on standard error: one living line on a terminal, else a line now and then.

    Use it in a `with`; `look` is cheap and may be called at every token.
    """

    def __init__(
        self, label: str, counted: Counted, job: Job, *, total: int, done: int, correct: int
    ) -> None:
        """total: samples in all; done and correct: those of earlier starts."""
        self._label, self._counted, self._job = label, counted, job
        self._total, self._done, self._correct = total, done, correct
        self._start = self._last_look = self._last_line = time.monotonic()
        self._live: Live | None = None
        if job.is_main and sys.stderr.isatty():
            self._live = Live(Text(""), console=Console(stderr=True), auto_refresh=False)

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *unused: object) -> None:
        if self._job.is_main:
            self._show(last=True)
        if self._live is not None:
            self._live.stop()

    def look(self) -> None:
        """Show what is new, if it is time."""
        if self._job.is_main and time.monotonic() - self._last_look > _SECONDS_BETWEEN_LOOKS:
            self._last_look = time.monotonic()
            self._show()

    def tokens_per_second(self) -> float:
        """Of all engines together since this start."""
        tokens = self._job.add(self._counted.tokens, 0)
        return tokens / (time.monotonic() - self._start)

    def _show(self, *, last: bool = False) -> None:
        due = last or time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES
        if self._live is not None:
            self._live.update(Text(self.line()), refresh=True)
        elif due:
            self._last_line = time.monotonic()
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """Such as `model: 512 of 4096 samples, accuracy 91.2 %, 7,100 tokens/s, 1:20 left`."""
        new, correct = (
            self._job.add(name, 0) for name in (self._counted.samples, self._counted.correct)
        )
        done = self._done + new
        parts = [f"{self._label}: {done:,} of {self._total:,} samples"]
        if done:
            parts.append(f"accuracy {100 * (self._correct + correct) / done:.1f} %")
        if new:
            parts.append(f"{self.tokens_per_second():,.0f} tokens/s")
            seconds = (time.monotonic() - self._start) / new * (self._total - done)
            if done < self._total:
                parts.append(f"about {_clock(seconds)} left")
        return ", ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
