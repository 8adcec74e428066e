"""Writes a run's numbers on rank 0: to the console, JSON lines, TensorBoard, Weights & Biases."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any
from uuid import uuid4

from megatron_opsft.config import RunConfig
from megatron_opsft.errors import UserError, first_line, log
from megatron_opsft.methods.facts import sums_of_token_use
from megatron_opsft.records import Problem, Rollout, Verdict
from megatron_opsft.run.record.advice import describe_correct
from megatron_opsft.run.record.time_left import TimeLeft
from megatron_opsft.run.run_files import Line, describe_rejected
from megatron_opsft.runtime.console import say
from megatron_opsft.runtime.durable import append_line, write_text
from megatron_opsft.runtime.formatting import count_of, percent

_MAX_PROBLEM_CHARACTERS = 100
_MAX_RESPONSE_CHARACTERS = 240
_MAX_GOLD_CHARACTERS = 100
# Metrics that TensorBoard shows in groups of these names.
_OVERTHINKING = {
    *sums_of_token_use([]),
    "num_empty_think",
    "num_malformed_think",
    "num_unclosed_think",
    "num_stating_right",
}
_TRAINING = {
    "loss",
    "grad_norm",
    "lr",
    "clip_share",
    "kl_mean",
    "trained_tokens",
    "num_microbatches",
    "packing_efficiency",
    "rank_imbalance",
    "weight_version",
    "logprob_diff_mean",
    "logprob_diff_max",
}


class MetricsLog:
    """Writes metrics everywhere. Floats in the JSON lines read back as the same numbers."""

    def __init__(
        self,
        config: RunConfig,
        *,
        first_step: int,
        checkpoint_every: int = 0,
        eval_seconds: float = 0.0,
    ) -> None:
        """Open the writers.

        first_step: the step after which the run begins or is resumed. checkpoint_every,
        eval_seconds: see `TimeLeft`.
        """
        self._config = config
        self._time_left = TimeLeft(
            first_step=first_step,
            last_step=config.steps,
            eval_every=config.eval_every,
            checkpoint_every=checkpoint_every,
            eval_seconds=eval_seconds,
        )
        self._writers: list[_TensorBoard | _Wandb] = []
        if config.tensorboard:
            self._writers.append(_TensorBoard(config.dir / "tensorboard", first_step))
        if config.wandb != "off":
            self._writers.append(_Wandb(config))

    def write_step(self, metrics: Line) -> None:
        """Write the metrics of a training step."""
        self._write("metrics.jsonl", metrics)
        accuracy = accepted = ""
        if "accuracy" in metrics:  # fixed data are not judged
            accuracy = f"accuracy {percent(metrics['accuracy'])}  "
            accepted = f"accepted {metrics['num_accepted']}/{metrics['num_rollouts']}"
            rejected = describe_rejected(metrics)
            if rejected:
                accepted += f" ({rejected})"
            accepted += "  "
        say(
            f"step {metrics['step']}/{self._config.steps}  loss {metrics['loss']:.4f}  {accuracy}"
            f"tokens {metrics['mean_response_tokens']:.1f}  {accepted}"
            f"grad norm {metrics['grad_norm']:.3f}  lr {metrics['lr']:.2e}  "
            f"{metrics['step_seconds']:.2f} s  about {self._time_left.after(metrics):.0f} s left"
        )

    def write_evaluation(self, metrics: Line, more: Iterable[str] = ()) -> None:
        """Write the metrics of an evaluation on held-out problems.

        more: the names of the sets of eval.more, which `metrics` has too.
        """
        self._time_left.eval_seconds = metrics["eval_seconds"]
        self._write("evals.jsonl", metrics)
        self._print_evaluation("held-out", metrics, "eval", describe_correct(metrics))
        for name in more:
            self._print_evaluation(name, metrics, f"eval_{name}")

    def _print_evaluation(
        self, name: str, metrics: Line, key: str, more: str = ""
    ) -> None:
        """Print the line of one held-out set.

        key: the prefix of its keys in `metrics`. more: text for the end of the line.
        """
        samples = count_of([metrics[f"{key}_samples"]], "sample")
        if rejected := describe_rejected(metrics, f"{key}_"):
            samples += f": {rejected}"
        line = (
            f"{name} after step {metrics['step']}: "
            f"accuracy {percent(metrics[f'{key}_accuracy'])}, "
            f"{metrics[f'{key}_mean_response_tokens']:.1f} tokens, "
            f"{percent(metrics[f'{key}_truncated_share'])} cut off "
            f"({samples})"
        )
        say(f"{line}; {more}" if more else line)

    def _write(self, name: str, metrics: Line) -> None:
        append_line(self._config.dir / name, json.dumps(dict(metrics)))
        for writer in list(self._writers):
            self._try(writer, partial(writer.write, metrics))

    def close(self) -> None:
        """Close the writers."""
        for writer in list(self._writers):
            self._try(writer, writer.close)

    def _try(self, writer: "_TensorBoard | _Wandb", act: Callable[[], None]) -> None:
        """Do something with a writer; drop a writer that fails: the JSON lines have everything."""
        try:
            act()
        except Exception as error:  # of a package that the run does not depend on
            self._writers.remove(writer)
            log.warning(
                "nothing more is written to %s: %s", writer.name, first_line(error)
            )


def describe_sample(problem: Problem, rollout: Rollout, verdict: Verdict) -> str:
    """Return problem and response for people to read, each on a line that is not too long."""
    question = shorten(problem.text, _MAX_PROBLEM_CHARACTERS, placeholder=" ...")
    response = _on_a_line(rollout.text, _MAX_RESPONSE_CHARACTERS)
    return (
        f"  for example: {question}\n  -> {response} ({len(rollout.response_ids)} tokens, "
        f"{verdict.outcome.value}, gold {_on_a_line(problem.answer, _MAX_GOLD_CHARACTERS)})"
    )


def _on_a_line(text: str, max_characters: int) -> str:
    """Return a text on one line, without its middle if it is long."""
    line = " ".join(text.split())
    if len(line) <= max_characters:
        return line
    half = max_characters // 2
    return f"{line[:half]} [...] {line[-half:]}"


def tag_of(key: str) -> str:
    """Return the name of a metric in TensorBoard, which shows together what is equal up to a /."""
    of_evaluation = key.startswith("eval_")
    if key.endswith("_seconds"):
        group = "seconds"
    elif of_evaluation and key.endswith(tuple(f"_{name}" for name in _OVERTHINKING)):
        group = "eval_overthinking"
    elif of_evaluation:
        group = "eval"
    elif key in _OVERTHINKING:
        group = "overthinking"
    elif key in _TRAINING:
        group = "training"
    else:
        group = "responses"
    return f"{group}/{key}"


class _TensorBoard:
    """TensorBoard's event files. Steps after `first_step` replace those of an earlier start.

    A metric that has always been 0 has no curve; another value brings all of it. A resumed run
    draws every metric, as it does not know which have curves.
    """

    name = "TensorBoard"

    def __init__(self, directory: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step + 1)
        self._hides_zeros = first_step == 0
        self._steps_at_zero: dict[str, list[int]] = {}  # of metrics without a curve
        self._drawn: set[str] = set()

    def write(self, metrics: Line) -> None:
        step = int(metrics["step"])
        for key, value in metrics.items():
            if key == "step":
                continue
            if self._hides_zeros and value == 0 and key not in self._drawn:
                self._steps_at_zero.setdefault(key, []).append(step)
                continue
            self._drawn.add(key)
            for earlier in self._steps_at_zero.pop(key, ()):
                self._writer.add_scalar(tag_of(key), 0, earlier)
            self._writer.add_scalar(tag_of(key), value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases, which a resumed run continues."""

    name = "Weights & Biases"

    def __init__(self, config: RunConfig) -> None:
        import wandb  # installed, see `check_run`

        id_file = config.dir / "wandb/run_id"
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

    def write(self, metrics: Line) -> None:
        self._run.log(dict(metrics), step=int(metrics["step"]))

    def close(self) -> None:
        self._run.finish()
