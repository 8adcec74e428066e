"""Where rank 0 writes a run's numbers: console, metrics.jsonl, TensorBoard, Weights & Biases."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any
from uuid import uuid4

from megatron_opsft.config import RunConfig
from megatron_opsft.errors import UserError, first_line
from megatron_opsft.records import Problem, Rollout, Verdict
from megatron_opsft.run.record.advice import (
    describe_correct,
    describe_rejected,
    warn_of_cut_off,
)
from megatron_opsft.run.start.run_directory import RunDir
from megatron_opsft.runtime.console import say
from megatron_opsft.runtime.durable import append_line, write_text

log = logging.getLogger("megatron_opsft")

_PROBLEM_CHARACTERS = 100
_RESPONSE_CHARACTERS = 240

Values = Mapping[str, float | int]


class MetricsLog:
    """Fan-out of one run's metrics. Floats in the JSON lines read back as the same numbers."""

    def __init__(self, run_dir: RunDir, config: RunConfig, *, first_step: int) -> None:
        self._directory = run_dir.path
        self._num_steps, self._eval_every = config.steps, config.eval_every
        self._evaluation_seconds = 0.0  # of the last evaluation
        self._warned: set[str] = set()
        self._writers: list[Any] = []
        if config.tensorboard:
            self._writers.append(_TensorBoard(run_dir.path / "tensorboard", first_step))
        if config.wandb != "off":
            self._writers.append(_Wandb(config, run_dir.path / "wandb/run_id"))

    def step(self, metrics: Values) -> None:
        """One finished training step."""
        self._append("metrics.jsonl", metrics)
        step = int(metrics["step"])
        seconds = metrics["step_seconds"]
        parts = [
            f"step {step}/{self._num_steps}",
            f"loss {metrics['loss']:.4f}",
            f"tokens {metrics['mean_response_tokens']:.1f}",
            f"grad norm {metrics['grad_norm']:.3f}",
            f"lr {metrics['lr']:.2e}",
            f"{seconds:.2f} s",
            f"about {self._seconds_left(step, seconds):.0f} s left",
        ]
        if "accuracy" in metrics:  # fixed data are not judged
            accepted = f"accepted {metrics['num_accepted']}/{metrics['num_rollouts']}"
            rejected = describe_rejected(metrics)
            parts.insert(2, f"accuracy {100 * metrics['accuracy']:.1f} %")
            parts.insert(4, f"{accepted} ({rejected})" if rejected else accepted)
        say("  ".join(parts))

    def _seconds_left(self, step: int, seconds: float) -> float:
        """After a step that took so long, with the evaluations that are still to come."""
        every, last = self._eval_every, self._num_steps
        due = {last, *(range(-(-step // every) * every, last, every) if every else ())}
        return (last - step) * seconds + len(due) * self._evaluation_seconds

    def evaluation(
        self, metrics: Values, more: Iterable[str] = (), *, seconds: float = 0
    ) -> None:
        """One evaluation on held-out problems. more: names of other sets that `metrics` has.
        seconds: that it took.
        """
        self._evaluation_seconds = seconds
        self._append("evals.jsonl", metrics)
        correct = describe_correct(metrics)
        for name, key in (
            ("held-out", "eval"),
            *((name, f"eval_{name}") for name in more),
        ):
            say(
                f"{name} after step {metrics['step']}: "
                f"accuracy {100 * metrics[f'{key}_accuracy']:.1f} %, "
                f"{metrics[f'{key}_mean_response_tokens']:.1f} tokens, "
                f"{100 * metrics[f'{key}_truncated_share']:.1f} % cut off "
                f"({metrics[f'{key}_samples']} samples)"
                + (f"; {correct}" if key == "eval" and correct else "")
            )
            if name not in self._warned and (
                warning := warn_of_cut_off(name, metrics, key)
            ):
                self._warned.add(name)
                log.warning("%s", warning)

    def samples(self, shown: Sequence[tuple[Problem, Rollout, Verdict]]) -> None:
        """Print responses of an evaluation; long ones without their middles."""
        for one in shown:
            say(_in_short(*one), dim=True)

    def _append(self, name: str, metrics: Values) -> None:
        append_line(self._directory / name, json.dumps(dict(metrics)))
        for writer in list(self._writers):
            self._let(writer, partial(writer.write, metrics))

    def close(self) -> None:
        """Flush everything."""
        for writer in list(self._writers):
            self._let(writer, writer.close)

    def _let(self, writer: "_TensorBoard | _Wandb", act: Callable[[], None]) -> None:
        """A writer that fails is left out from then on: the JSON lines have everything."""
        try:
            act()
        except Exception as error:  # of a package that the run does not depend on
            self._writers.remove(writer)
            log.warning(
                "nothing more is written to %s: %s", writer.name, first_line(error)
            )


def _in_short(problem: Problem, rollout: Rollout, verdict: Verdict) -> str:
    """Problem and response, each on a line that is not too long."""
    asked = shorten(problem.text, _PROBLEM_CHARACTERS, placeholder=" ...")
    response = " ".join(rollout.text.split())
    if len(response) > _RESPONSE_CHARACTERS:
        half = _RESPONSE_CHARACTERS // 2
        response = f"{response[:half]} [...] {response[-half:]}"
    num_tokens = len(rollout.response_ids)
    about = f"{num_tokens} tokens, {verdict.outcome.value}, gold {problem.answer}"
    return f"  for example: {asked}\n  -> {response} ({about})"


class _TensorBoard:
    name = "TensorBoard"

    def __init__(self, directory: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step + 1)

    def write(self, metrics: Values) -> None:
        step = int(metrics["step"])
        for key, value in metrics.items():
            if key != "step":
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """id_file: holds W&B's id of the run, so that a resumed run continues there."""

    name = "Weights & Biases"

    def __init__(self, config: RunConfig, id_file: Path) -> None:
        import wandb  # there, by preflight's check

        if not id_file.is_file():
            id_file.parent.mkdir(parents=True, exist_ok=True)
            write_text(id_file, uuid4().hex)
        try:
            self._run: Any = wandb.init(
                project=config.wandb_project,
                dir=str(config.dir),
                mode=config.wandb,
                id=id_file.read_text(encoding="utf-8"),
                resume="allow",
            )
        except Exception as error:  # no login, no network, no such project
            raise UserError(
                f"run.wandb={config.wandb}: W&B cannot be started ({first_line(error)}); see "
                "`wandb login`, or set run.wandb=offline"
            ) from error

    def write(self, metrics: Values) -> None:
        self._run.log(dict(metrics), step=int(metrics["step"]))

    def close(self) -> None:
        self._run.finish()
