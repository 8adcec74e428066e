"""Evaluates a run when it is due, and writes its models, the last and the best, as Hugging Face
directories.
"""

import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from megatron_opsft.models.storage.hf_writer import write_hf_model
from megatron_opsft.models.storage.partial import written_whole
from megatron_opsft.models.storage.replacing import check_out
from megatron_opsft.records import Callback
from megatron_opsft.run.held_out import EvalResult, HeldOut
from megatron_opsft.run.record.advice import (
    advise_on_base,
    measure_correct,
    worse_in_a_row,
)
from megatron_opsft.run.record.metrics import MetricsLog
from megatron_opsft.run.run_files import best_evaluation, read_json_lines
from megatron_opsft.run.start.run_directory import BEST
from megatron_opsft.run.start.session import Session, log
from megatron_opsft.runtime.distributed import broadcast_object
from megatron_opsft.runtime.durable import (
    FullDiskError,
    in_step_order,
    list_checkpoints,
    remove,
    step_in,
    step_name,
    sync_path,
    write_files,
)
from megatron_opsft.runtime.phase import (
    Interrupted,
    StopSignal,
    announce,
    enter_phase,
    interruptible,
)


class ModelExports:
    """Writes models to a run's directory. Every rank calls every method.

    Rank 0 writes a model as a whole or not at all.
    """

    def __init__(self, session: Session, run_dir: Path) -> None:
        self._s = session
        self._dir = run_dir

    def write(self, name: str, card: str = "") -> None:
        """Write the current weights to the folder `name`, replacing it.

        card: the text of the model's README.md; only rank 0's counts. Errors, on rank 0: those of
        `write_hf_model`. After a `FullDiskError` the ranks can go on.
        """
        enter_phase("export")
        stream = self._s.sync.exporter.stream()
        failure: FullDiskError | None = None
        if self._s.layout.is_main:
            try:
                write_hf_model(
                    self._dir / name,
                    stream,
                    shapes=self._s.shards.table.hf_shapes(),
                    dtype=self._s.shards.parameters[0][1].dtype,
                    source_dir=self._s.model_dir,
                    card=card,
                    overwrite=True,
                )
            except FullDiskError as error:
                failure = error
        # Every rank takes part to the end of the stream, also if rank 0 cannot write.
        for _ in stream:
            pass
        if failure is not None:
            raise failure

    def has_best(self, step: int) -> bool:
        """True if best/ has the model of that step."""
        return (self._best(step) / "config.json").is_file()

    def copy_best(self, step: int, name: str, card: str) -> None:
        """Copy the model of that step from best/ to the folder `name`, replacing it.

        card: see `write`.
        """
        enter_phase("export")
        if not self._s.layout.is_main:
            return
        check_out(self._dir / name, [self._best(step)], overwrite=True)
        with written_whole(self._dir / name) as written:
            for path in self._best(step).iterdir():
                shutil.copyfile(path, written.directory / path.name)
                sync_path(written.directory / path.name)
            write_files(written.directory, {"README.md": card.encode()})

    def _best(self, step: int) -> Path:
        return self._dir / BEST / step_name(step)

    def write_best(self, step: int) -> None:
        """Write the weights after `step` updates to best/, unless a resumed run finds them there.

        If the disk is full, the run goes on without them after a warning.
        """
        name = f"{BEST}/{step_name(step)}"
        if not broadcast_object(self.has_best(step)):
            announce(f"writing {name}")
            try:
                self.write(name)
            except FullDiskError as error:
                log.warning(
                    "%s; the best model is not kept, and the run continues", error
                )

    def drop_superseded(self, step: int, *, finished: bool = False) -> None:
        """Remove models of best/ that a better one has replaced, after `step` updates.

        A run resumed from a checkpoint needs the best model of that time, which is the newest one
        before the checkpoint. So one model stays for each checkpoint that exists or is being
        written, unless the run has finished.
        """
        if not self._s.layout.is_main:
            return
        models = in_step_order((self._dir / BEST).glob("*"))
        resumable_steps = [step]
        if not finished:
            for path in list_checkpoints(self._dir / "checkpoints"):
                resumable_steps.append(step_in(path.name) or 0)
            every = self._s.config.checkpoint.every
            if every:
                resumable_steps.append(step - step % every)
        needed_steps = set()
        for resumable in resumable_steps:
            earlier = [
                model_step for model_step, _ in models if model_step <= resumable
            ]
            needed_steps.update(earlier[-1:])
        for model_step, path in models:
            if model_step not in needed_steps:
                # What cannot be removed now is tried again the next time.
                remove(path, quietly=True)


class Evaluations:
    """Evaluates on the held-out problems. Every rank calls every method; rank 0 has a `log`, reads
    and writes evals.jsonl, and calls the callbacks.
    """

    def __init__(
        self,
        session: Session,
        exports: ModelExports,
        log: MetricsLog | None,
        callbacks: Sequence[Callback],
    ) -> None:
        self._callbacks = callbacks
        self._s = session
        self._exports = exports
        self._log = log
        self._path = session.config.run.dir / "evals.jsonl"
        self._num_worse: int | None = (
            None  # see `worse_in_a_row`; None: not counted yet
        )

    def evaluate_if_due(self, step: int, stop: StopSignal) -> bool:
        """Evaluate if it is due after `step` updates, unless a resumed run finds it done.

        It is due before the first step, every `run.eval_every` steps, and after the last step.
        Returns True on every rank if a signal interrupted it.
        """
        run = self._s.config.run
        is_regular = run.eval_every > 0 and step % run.eval_every == 0
        is_due = is_regular or step in (0, run.steps)
        if not is_due or self._s.held_out is None:
            return False
        if not broadcast_object(any(line["step"] == step for line in self.lines())):
            interruption: AbstractContextManager[None] = nullcontext()
            # Ranks that share an engine could not leave it at the same time.
            if self._s.sampler.engine.share.count == self._s.layout.world_size:
                interruption = interruptible(lambda: stop.signalled)
            try:
                with interruption:
                    self.evaluate(step)
            except Interrupted:
                return True
        best_step = broadcast_object(self._best_step())
        if self._s.config.eval.keeps_best and best_step == step and step:
            self._exports.write_best(step)
        self._exports.drop_superseded(step)
        return False

    def evaluate(self, step: int) -> None:
        """Measure held-out accuracy and length after `step` updates, and write evals.jsonl."""
        assert self._s.held_out is not None
        self._num_worse = None
        enter_phase("evaluate")
        line: dict[str, Any] = {"step": step}
        begin = time.monotonic()
        result = self._evaluate_set(
            "held-out problems", self._s.held_out, self._s.config.run.show_samples
        )
        line |= _with_prefix("eval", result)
        line |= measure_correct(result.correct_lengths)
        for name, held_out in self._s.more_held_out.items():
            more = self._evaluate_set(f"problems of {name}", held_out, num_shown=0)
            line |= _with_prefix(f"eval_{name}", more)
        if self._log is None:
            return
        seconds = time.monotonic() - begin
        self._log.write_evaluation(line, self._s.more_held_out, seconds=seconds)
        self._log.print_samples(result.shown)
        advice = "" if step else advise_on_base(line)
        if advice:
            if self._s.config.data.template != "chat":
                advice += "; a small instruct model may need data.template=chat"
            log.warning("%s", advice)
        for callback in self._callbacks:
            callback.on_evaluation(line)

    def _evaluate_set(
        self, title: str, held_out: HeldOut, num_shown: int
    ) -> EvalResult:
        announce(f"evaluating on {len(held_out.problems)} {title}")
        return held_out.evaluate(
            self._s.sampler,
            self._s.verifier,
            partial(self._s.prompt_of, held_out=True),
            num_shown=num_shown,
        )

    def worse_in_a_row(self) -> int:
        """Count the last evaluations in a row that were worse than the base model's.

        Every step asks, so the lines are read only once after each evaluation.
        """
        if self._num_worse is None:
            self._num_worse = broadcast_object(worse_in_a_row(self.lines()))
        return self._num_worse

    def step_of_best_model(self) -> int:
        """Return the step of the best evaluation if best/ has its model, else 0."""
        step = self._best_step()
        return broadcast_object(step if self._exports.has_best(step) else 0)

    def _best_step(self) -> int:
        """Return the step of the best evaluation on rank 0, and 0 elsewhere."""
        best = best_evaluation(self.lines(), self._s.config.eval.best_within)
        return 0 if best is None else best["step"]

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of evals.jsonl on rank 0, and none elsewhere."""
        if self._log is None:
            return []
        required = ("eval_accuracy", "eval_mean_response_tokens")
        return read_json_lines(self._path, required=required)


def _with_prefix(key: str, result: EvalResult) -> dict[str, float | int]:
    return {f"{key}_{name}": value for name, value in result.values.items()}
