"""Evaluations during a run: when they are due, on which problems, and what is kept; and the run's
models as Hugging Face directories, the last and the best.
"""

import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from megatron_opsft.models.storage.hf_writer import write_hf_model
from megatron_opsft.models.storage.partial import written_whole
from megatron_opsft.models.storage.replacing import check_out
from megatron_opsft.records import Callback
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
    """Every rank calls every method; rank 0 writes, whole directories or none."""

    def __init__(self, session: Session, run_dir: Path) -> None:
        self._s = session
        self._dir = run_dir

    def write(self, name: str, card: str = "") -> None:
        """Write the current weights to `name` in the run's directory, in place of what is there.

        card: the text of the model's README.md; that of rank 0 counts. Errors, on rank 0: as of
        `write_hf_model`; after `FullDiskError` the ranks can go on.
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
        for (
            _
        ) in stream:  # every rank takes part to its end, also where rank 0 cannot write
            pass
        if failure is not None:
            raise failure

    def has_best(self, step: int) -> bool:
        """Whether best/ has the model of that step."""
        return (self._best(step) / "config.json").is_file()

    def write_kept(self, name: str, step: int, card: str = "") -> None:
        """Write the model of that step, which best/ has, to `name`; otherwise as `write`."""
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
        """Write the weights after `step` updates, unless a resumed run finds them written. Where
        the disk is full, a warning says so, and the run goes on without them.
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
        """Remove best models that a better one has replaced, after `step` updates.

        A run resumed from a checkpoint needs the newest best model of that time, so one stays for
        each checkpoint that is there or is being written, unless the run has finished.
        """
        if not self._s.layout.is_main:
            return
        there = in_step_order((self._dir / BEST).glob("*"))
        resumable = [step]
        if not finished:
            resumable += [
                step_in(p.name) or 0
                for p in list_checkpoints(self._dir / "checkpoints")
            ]
            resumable += (
                [step - step % every]
                if (every := self._s.config.checkpoint.every)
                else []
            )
        needed = {
            max((s for s, _ in there if s <= saved), default=0) for saved in resumable
        }
        for written, path in there:
            if written not in needed:
                remove(path, quietly=True)  # what is left is there the next time


class Evaluations:
    """Every rank calls every method; `log` is rank 0's, which reads and writes evals.jsonl."""

    def __init__(
        self,
        session: Session,
        exports: ModelExports,
        log: MetricsLog | None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """callbacks: are told of each evaluation, on rank 0."""
        self._callbacks = callbacks
        self._s = session
        self._exports = exports
        self._log = log
        self._path = session.config.run.dir / "evals.jsonl"
        self._worse: int | None = None  # as `worse_in_a_row` gives it; None: to be read

    def look(self, step: int, stop: StopSignal) -> bool:
        """Evaluate if it is due after `step` updates, unless a resumed run finds it done.

        It is due before the first step, after every `run.eval_every`, and after the last. Returns
        True on every rank if a signal interrupted it, which needs an engine on each rank.
        """
        run, settings = self._s.config.run, self._s.config.eval
        due = step in (0, run.steps) or (run.eval_every and step % run.eval_every == 0)
        if not due or self._s.held_out is None:
            return False
        if not broadcast_object(any(line["step"] == step for line in self.lines())):
            engine, world_size = self._s.sampler.engine, self._s.layout.world_size
            may_leave = engine.share.count == world_size
            try:
                with (
                    interruptible(lambda: stop.signalled)
                    if may_leave
                    else nullcontext()
                ):
                    self.evaluate(step)
            except Interrupted:
                return True
        lines = self.lines()
        best = best_evaluation(lines, settings.best_within)
        best_step = broadcast_object(step if best is None else best["step"])
        if settings.keeps_best and best_step == step and step:
            self._exports.write_best(step)
        self._exports.drop_superseded(step)
        return False

    def evaluate(self, step: int) -> None:
        """Held-out accuracy and length after `step` updates, into evals.jsonl."""
        assert self._s.held_out is not None
        self._worse = None
        enter_phase("evaluate")
        encode = partial(self._s.prompt_of, held_out=True)
        line: dict[str, Any] = {"step": step}
        begin = time.monotonic()
        for name, held_out in {"": self._s.held_out, **self._s.more_held_out}.items():
            of_name = f"problems of {name}" if name else "held-out problems"
            announce(f"evaluating on {len(held_out.problems)} {of_name}")
            result = held_out.evaluate(
                self._s.sampler,
                self._s.verifier,
                encode,
                num_shown=0 if name else self._s.config.run.show_samples,
            )
            key = f"eval_{name}" if name else "eval"
            line |= {
                f"{key}_{value}": number for value, number in result.values.items()
            }
            if not name:
                line |= measure_correct(result.correct_lengths)
                shown = result.shown
        if self._log is not None:
            seconds = time.monotonic() - begin
            self._log.evaluation(line, self._s.more_held_out, seconds=seconds)
            self._log.samples(shown)
            if not step and (advice := advise_on_base(line)):
                if self._s.config.data.template != "chat":
                    advice += "; a small instruct model may need data.template=chat"
                log.warning("%s", advice)
            for callback in self._callbacks:
                callback.on_evaluation(line)

    def worse_in_a_row(self) -> int:
        """How many evaluations in a row, up to the last one, were worse than the base model. Every
        step asks, so the lines are read only once after each evaluation.
        """
        if self._worse is None:
            self._worse = broadcast_object(worse_in_a_row(self.lines()))
        return self._worse

    def best_kept(self) -> int:
        """The step of the best evaluation where best/ has its model; 0 where it has not."""
        best = best_evaluation(self.lines(), self._s.config.eval.best_within)
        is_kept = best is not None and self._exports.has_best(best["step"])
        return broadcast_object(best["step"] if best is not None and is_kept else 0)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of evals.jsonl on rank 0; none elsewhere."""
        required = ("eval_accuracy", "eval_mean_response_tokens")
        return (
            read_json_lines(self._path, required=required)
            if self._log is not None
            else []
        )
