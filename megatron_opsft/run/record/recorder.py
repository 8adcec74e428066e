"""What a run records, and how it resumes."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_opsft.config.load import load_config, to_yaml
from megatron_opsft.errors import UserError
from megatron_opsft.records import Callback, StepResult, SyncResult, TokenScores
from megatron_opsft.run.record.advice import (
    RECENT_STEPS,
    describe_early_end,
    explain_empty_step,
    explain_few_accepted,
    explain_left_out,
    few_accepted,
    warn_of_decline,
)
from megatron_opsft.run.record.evaluations import Evaluations, ModelExports
from megatron_opsft.run.record.metrics import MetricsLog
from megatron_opsft.run.record.rollout_log import RolloutLog
from megatron_opsft.run.record.summary import (
    adjustments,
    manifest_of,
    model_card,
    summarize,
)
from megatron_opsft.run.run_files import describe_skipped, is_skipped
from megatron_opsft.run.start.run_directory import RunDir
from megatron_opsft.run.start.session import Session, log
from megatron_opsft.run.step.batch import JudgedBatch
from megatron_opsft.runtime.console import say
from megatron_opsft.runtime.device import peak_memory_bytes
from megatron_opsft.runtime.distributed import max_over_world
from megatron_opsft.runtime.durable import (
    list_checkpoints,
    step_name,
    write_json,
    write_text,
)
from megatron_opsft.runtime.phase import StopSignal, Stopwatch, enter_phase
from megatron_opsft.trainer.batching.packing import PackingReport


class RunRecorder:
    """The records of one run. Methods are called by every rank; rank 0 writes."""

    def __init__(
        self,
        session: Session,
        run_dir: RunDir,
        last_step: int,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._s = session
        self._callbacks = callbacks
        self._told: tuple[int, Path] | None = None
        self._dir = run_dir
        self._has_told_left_out = self._has_told_empty = self._has_told_few = False
        self._recent: deque[Mapping[str, float | int]] = deque(maxlen=RECENT_STEPS)
        self._watch = Stopwatch(session.device)
        self.last_step = self._saved = last_step
        self._rollouts = RolloutLog(run_dir.path / "rollouts", session.layout)
        self._log: MetricsLog | None = None
        if session.layout.is_main:
            self._log = MetricsLog(run_dir, session.config.run, first_step=last_step)
        self._exports = ModelExports(session, run_dir.path)
        self._evaluations = Evaluations(session, self._exports, self._log, callbacks)

    def begin_rollouts(
        self, step: int, batch: JudgedBatch, scores: Mapping[int, TokenScores]
    ) -> None:
        """Write a step's responses in the background."""
        if self._s.config.run.save_rollouts:
            self._rollouts.begin(step, batch, scores)

    def record(
        self,
        step: int,
        batch: JudgedBatch,
        packing: PackingReport,
        result: StepResult,
        pushed: SyncResult,
        watch: Stopwatch,
    ) -> None:
        """Write a line of metrics.jsonl, once all ranks' responses are on disk.

        checkpoint_seconds: how long checkpoints have kept the run waiting since the last line.
        """
        self._settle_checkpoint(wait=False)
        enter_phase("record")
        self._rollouts.finish()
        max_over_world([0.0])  # wait until every rank is here
        if self._log is None:
            return
        known: dict[str, float | int | None] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            **batch.describe(),
            "clip_share": result.clip_share,
            "kl_mean": result.kl_mean,
            "trained_tokens": result.trained_tokens,
            "num_microbatches": result.num_microbatches,
            "packing_efficiency": packing.fill,
            "rank_imbalance": packing.imbalance,
            **batch.metrics,
            "weight_version": pushed.version,
            "logprob_diff_mean": pushed.logprob_diff_mean,
            "logprob_diff_max": pushed.logprob_diff_max,
            **{f"{phase}_seconds": seconds for phase, seconds in watch.seconds.items()},
            "checkpoint_seconds": self._watch.seconds.pop("checkpoint"),
            "step_seconds": watch.total(),
        }
        metrics = {key: value for key, value in known.items() if value is not None}
        self._log.step(metrics)
        self._explain(metrics)
        for callback in self._callbacks:
            callback.on_step(metrics)

    def _explain(self, metrics: Mapping[str, float | int]) -> None:
        """Say once why a step learned nothing, once that few responses are accepted, and once that
        a step left some out.
        """
        config = self._s.config
        self._recent.append(metrics)
        if not self._has_told_few and (few := few_accepted(self._recent)):
            self._has_told_few = True
            base = next(iter(self._evaluations.lines()), {})
            said = explain_few_accepted(few, config.rollout.max_response_tokens, base)
            log.warning("%s", said)
        if metrics.get("num_pairs_left_out"):
            if not self._has_told_left_out:
                self._has_told_left_out = True
                room = config.train.max_tokens_per_microbatch * self._s.layout.cp_size
                positions = self._s.shards.table.shape.max_position_embeddings
                said = explain_left_out(metrics, room=room, positions=positions)
                log.warning("%s", said)
        elif is_skipped(metrics) and not self._has_told_empty:
            self._has_told_empty = True
            base = next(iter(self._evaluations.lines()), {})
            said = explain_empty_step(metrics, config.rollout.max_response_tokens, base)
            log.warning("%s", said)

    def stop(self, step: int) -> None:
        """Write the checkpoint and the last line of a run that is stopping."""
        self.checkpoint(step, leaving=True)
        if self._log is not None:
            done = (
                f"after step {step}, checkpoint {step_name(step)}"
                if step
                else "before step 1"
            )
            say(f"stopped {done}; continue with --resume")

    def say_resumed(self) -> None:
        """Say where a resumed run continues."""
        if self._log is not None:
            where = (
                f"checkpoint {step_name(self.last_step)}"
                if self.last_step
                else "the start"
            )
            steps = self._s.config.run.steps
            say(f"continues from {where}: {self.last_step} of {steps} steps are done")

    def look(self, step: int, stop: StopSignal) -> bool:
        """Evaluate if it is due after `step` updates. Returns whether `stop` interrupted it.

        A run that is asked to stop writes its checkpoint; the resumed run makes the evaluation.
        """
        return self._evaluations.look(step, stop)

    def gives_up(self) -> bool:
        """Whether `eval.stop_when_worse` ends the run here."""
        most = self._s.config.eval.stop_when_worse
        return most > 0 and self._evaluations.worse_in_a_row() >= most

    def checkpoint(self, step: int, *, leaving: bool = False) -> None:
        """Save the state after `step` updates.

        leaving: wait until it is on disk. Errors: `UserError` if it cannot be written; without
        `leaving` that is a warning, and the next checkpoint is tried at its time.
        """
        if leaving and step == self._saved and not self._settle_checkpoint(wait=True):
            return
        self._saved = step
        checkpointer = self._s.checkpointer
        about = {"method_state": self._s.method.state.model_dump()}
        with self._watch.phase("checkpoint"):
            if leaving:
                checkpointer.save(step, about)
                self._tell_checkpoint()
                return
            in_background = self._s.config.checkpoint.asynchronous
            checkpointer.start(step, about, in_background=in_background)
        self._tell_checkpoint()
        if not in_background:
            self._settle_checkpoint(wait=True)

    def _settle_checkpoint(self, *, wait: bool) -> str | None:
        """Publish a checkpoint that was written in the background; why it failed, or None."""
        with self._watch.phase("checkpoint"):
            failure = self._s.checkpointer.finish(wait=wait)
        if failure and self._log is not None:
            log.warning(
                "%s; the older checkpoints stay, and the run continues", failure
            )
        self._tell_checkpoint()
        return failure

    def _tell_checkpoint(self) -> None:
        """Tell the callbacks of a new checkpoint; on rank 0."""
        if (
            published := self._s.checkpointer.published
        ) is None or published == self._told:
            return
        self._told = published
        for callback in self._callbacks:
            callback.on_checkpoint(*published)

    def fail(self) -> None:
        """Finish writing the responses of a step whose loss was not finite, and the checkpoint
        before it: every rank is about to leave.
        """
        self._rollouts.finish()
        self._settle_checkpoint(wait=True)

    def finish(self, step: int) -> None:
        """Export the model after `step` updates as a Hugging Face directory with its card, and
        write summary.json. A run that gives up exports its best model, and has a checkpoint to go
        on from.
        """
        config, is_writer, worse, kept = self._s.config, self._log is not None, 0, 0
        if step < config.run.steps:
            self.checkpoint(step, leaving=True)
            worse, kept = (
                self._evaluations.worse_in_a_row(),
                self._evaluations.best_kept(),
            )
        summary = (
            summarize(self._dir.path, config, step, kept or step) if is_writer else {}
        )
        if worse:
            summary["worse_in_a_row"] = worse
        if step:  # else it would be a copy of the base model
            card = model_card(summary, config, *self._s.example()) if is_writer else ""
            if kept:
                self._exports.write_kept("hf", kept, card)
            else:
                self._exports.write("hf", card)
        self._exports.drop_superseded(step, finished=True)
        peak = max_over_world([peak_memory_bytes(self._s.device)])[0]
        if not is_writer:
            return
        summary["peak_memory_bytes"] = int(peak)
        write_json(
            self._dir.path / "summary.json", summary
        )  # from here on the run is finished
        if worse:
            log.warning("%s", describe_early_end(worse, step, kept or step, config))
        if learned := describe_skipped(summary["skipped_steps"], summary["steps"]):
            log.warning("%s", learned)
        elif step:
            place = self._dir.path
            log.info(
                "the model is in %s; `megatron-opsft report %s` compares",
                place / "hf",
                place,
            )
            if decline := warn_of_decline(self._evaluations.lines(), config):
                log.warning("%s", decline)

    def close(self) -> None:
        """Flush the metrics writers, also when the run stops early."""
        if self._log is not None:
            self._log.close()


@contextmanager
def open_recorder(
    session: Session,
    *,
    resume: bool,
    overwrite: bool,
    callbacks: Sequence[Callback] = (),
) -> Iterator[RunRecorder]:
    """Create the run directory, or load its newest checkpoint. Called by every rank.

    Errors: `UserError` for a directory that holds a run already, or a resume that would not
    continue the same run.
    """
    config = session.config
    run_dir = RunDir(config.run.dir)
    if session.layout.is_main:
        sources = [Path(source.path) for source in config.data.sources]
        run_dir.open(
            resume=resume, overwrite=overwrite, needed=[session.model_dir, *sources]
        )
    last_step, earlier = 0, {}
    if session.layout.is_main and resume:
        earlier = run_dir.read_manifest() or {}
    about = manifest_of(session, earlier)
    if resume and list_checkpoints(session.checkpointer.directory):
        # What runs of earlier versions did not write down cannot be compared.
        run_dir.check_same(about["identity"], growing="model")
    if resume and (manifest := session.checkpointer.load_newest()):
        last_step = manifest["step"]
        session.method.restore(manifest.get("method_state", {"step": last_step + 1}))
    if last_step > config.run.steps:
        raise UserError(
            f"run.steps={config.run.steps}, but {config.run.dir} has a checkpoint of step "
            f"{last_step}; raise it"
        )
    if session.layout.is_main:
        run_dir.truncate(after_step=last_step)
        about["adjusted"] = earlier.get("adjusted", [])
        if last_step:
            before = load_config(run_dir.path / "config.yaml")
            versions = earlier.get("versions", {})
            about["adjusted"] += adjustments(before, config, versions, last_step)
        run_dir.write_manifest(
            about
        )  # first: without it nothing in the directory is a run's
        write_text(run_dir.path / "config.yaml", to_yaml(config))
        run_dir.save_bad_rows(session.bad_rows)
    recorder = RunRecorder(session, run_dir, last_step, callbacks)
    if resume:
        recorder.say_resumed()
    try:
        yield recorder
    finally:
        recorder.close()
