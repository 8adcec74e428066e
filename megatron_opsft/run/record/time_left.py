"""How long a run still takes, by what its steps, evaluations and checkpoints took so far; pure."""

from collections import deque
from statistics import fmean

from megatron_opsft.run.run_files import Line
from megatron_opsft.runtime.rounding import round_up

_NUM_STEPS = 8  # the newest ones, whose mean is what a step takes


class TimeLeft:
    """Estimates the seconds until the end of a run: steps, evaluations and checkpoints."""

    def __init__(
        self,
        *,
        first_step: int,
        last_step: int,
        eval_every: int,
        checkpoint_every: int,
        eval_seconds: float = 0.0,
    ) -> None:
        """Begin with nothing measured.

        first_step: the step after which this process begins. last_step: the run's. eval_every,
        checkpoint_every: steps between them, 0 for the end alone. eval_seconds: what the newest
        evaluation took before the run was resumed, 0 if nothing is evaluated.
        """
        self._first_step = first_step
        self._last_step = last_step
        self._eval_every = eval_every
        self._checkpoint_every = checkpoint_every
        self.eval_seconds = eval_seconds
        self._step_seconds: deque[float] = deque(maxlen=_NUM_STEPS)
        self._checkpoint_seconds = 0.0  # of all checkpoints of this process

    def after(self, metrics: Line) -> float:
        """Take in a line of metrics.jsonl, and return the seconds left after its step, in front of
        the evaluation and the checkpoint that are due at this step.
        """
        step, last = int(metrics["step"]), self._last_step
        self._checkpoint_seconds += metrics.get("checkpoint_seconds", 0.0)
        if step == self._first_step + 2:
            self._step_seconds.clear()  # the first step of a process also warms up
        self._step_seconds.append(metrics["step_seconds"])
        saved = _times_due(self._first_step + 1, step, self._checkpoint_every)
        each = self._checkpoint_seconds / saved if saved else 0.0
        # Both are due after the last step, too.
        num_evaluations = _times_due(step, last, self._eval_every) + 1
        num_checkpoints = _times_due(step, last, self._checkpoint_every) + 1
        return (
            (last - step) * fmean(self._step_seconds)
            + num_evaluations * self.eval_seconds
            + num_checkpoints * each
        )


def _times_due(start: int, stop: int, every: int) -> int:
    """Return how many of the steps from `start` to `stop` - 1 are multiples of `every`."""
    return len(range(round_up(start, every), stop, every)) if every else 0
