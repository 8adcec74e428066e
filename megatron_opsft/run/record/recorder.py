"""Records a run in its directory, step by step."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from megatron_opsft.callback import Callback
from megatron_opsft.models.storage.stored_weights import BASE_SHA256, LORA
from megatron_opsft.records import JsonObject, StepResult, SyncResult
from megatron_opsft.run.record.advice import (
    RECENT_STEPS,
    explain_empty_step,
    explain_few_accepted,
    explain_left_out,
    explain_slow_judge,
)
from megatron_opsft.run.record.ending import closing_lines, worse_in_a_row
from megatron_opsft.run.record.evaluations import Evaluations
from megatron_opsft.run.record.metrics import MetricsLog
from megatron_opsft.run.record.rollout_log import RolloutLog
from megatron_opsft.run.record.summary import model_card, read_evaluations, summarize
from megatron_opsft.run.record.written_models import (
    copy_best,
    drop_superseded,
    write_final,
)
from megatron_opsft.run.run_files import Line, is_skipped, read_json_lines
from megatron_opsft.run.start.session import Session, log
from megatron_opsft.run.step.batch import JudgedBatch
from megatron_opsft.runtime.console import say
from megatron_opsft.runtime.device import peak_memory_bytes
from megatron_opsft.runtime.distributed import broadcast_object, max_over_world
from megatron_opsft.runtime.durable import step_name, write_json
from megatron_opsft.runtime.phase import Stopwatch, enter_phase
from megatron_opsft.trainer.batching.packing import PackingReport
from megatron_opsft.verify.verifier import share_of_cores

_NOTHING_SAVED = -1  # no step


class RunRecorder:
    """Writes the records of one run. Every rank calls every method; rank 0 writes."""

    def __init__(
        self,
        session: Session,
        last_step: int,
        callbacks: Sequence[Callback],
        base_sha256: str,
    ) -> None:
        """Open the records. last_step: the step of the checkpoint that was loaded, else 0.
        base_sha256: hash of the model's files, for checkpoints.
        """
        self._s = session
        self._callbacks = callbacks
        self._base_sha256 = base_sha256
        self._dir = session.config.run.dir
        self.last_step = last_step
        self._saved_step = last_step
        self._published: tuple[int, Path] | None = None  # as the callbacks know it
        self._explained: set[str] = set()  # reasons that were warned of
        self._recent: deque[Line] = deque(maxlen=RECENT_STEPS)
        self._first_step: Line | None = None  # its metrics, once there are any
        self._watch = Stopwatch(session.device)
        self.rollouts = RolloutLog(session.config.run, session.layout)
        self._log: MetricsLog | None = None
        lines: list[JsonObject] = []
        if session.layout.is_main:
            lines = read_evaluations(self._dir)
            steps = read_json_lines(self._dir / "metrics.jsonl")
            self._first_step = next(iter(steps), None)
            self._log = MetricsLog(
                session.config.run,
                first_step=last_step,
                checkpoint_every=session.config.checkpoint.every,
                # Runs of earlier releases did not write it.
                eval_seconds=lines[-1].get("eval_seconds", 0.0) if lines else 0.0,
            )
        self.evaluations = Evaluations(
            session, self._log, self.rollouts, callbacks, broadcast_object(lines)
        )

    def record(
        self,
        step: int,
        batch: JudgedBatch,
        packing: PackingReport,
        result: StepResult,
        synced: SyncResult,
        watch: Stopwatch,
    ) -> None:
        """Write a line of metrics.jsonl, once all ranks' responses are on disk."""
        self._settle_checkpoint(wait=False)
        enter_phase("record")
        self.rollouts.finish()
        max_over_world([0.0])  # wait until every rank is here
        if self._log is None:
            return
        values: dict[str, float | int | None] = {
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
            "weight_version": synced.version,
            "logprob_diff_mean": synced.logprob_diff_mean,
            "logprob_diff_max": synced.logprob_diff_max,
            **{f"{phase}_seconds": seconds for phase, seconds in watch.seconds.items()},
            # How long checkpoints have kept the run waiting since the last line.
            "checkpoint_seconds": self._watch.seconds.pop("checkpoint"),
            "step_seconds": watch.total(),
        }
        metrics = {key: value for key, value in values.items() if value is not None}
        self._log.write_step(metrics)
        self._explain(metrics)
        for callback in self._callbacks:
            callback.on_step(metrics)

    def _explain(self, metrics: Line) -> None:
        """Warn once for each of three reasons why a run learns little: few responses are accepted,
        some are left out, a step learns nothing. Warn once of a judge that the run waits for.
        """
        config = self._s.config
        verify = config.verify
        if verify.own_judge:
            num_workers = verify.workers or share_of_cores()
            slow = explain_slow_judge(metrics, num_workers, self._s.layout.world_size)
            self._warn_once("slow judge", slow)
        base = next(iter(self.evaluations.lines), {})
        self._first_step = first = self._first_step or metrics
        self._recent.append(metrics)
        self._warn_once("few", explain_few_accepted(self._recent, config, base, first))
        if metrics.get("num_pairs_left_out"):
            max_tokens = config.train.max_tokens_per_microbatch
            reason = explain_left_out(
                metrics,
                room=max_tokens * self._s.layout.cp_size,
                positions=self._s.shards.table.shape.max_position_embeddings,
            )
            self._warn_once("left out", reason)
        elif is_skipped(metrics):
            self._warn_once("skipped", explain_empty_step(metrics, config, base, first))

    def _warn_once(self, reason: str, explanation: str) -> None:
        """Log the first explanation of each reason, if there is one."""
        if explanation and reason not in self._explained:
            self._explained.add(reason)
            log.warning(explanation)

    def stop(self, step: int) -> None:
        """Write the checkpoint and the last line of a run that is stopping."""
        self.checkpoint(step, leaving=True)
        if self._log is not None:
            moment = "before step 1"
            if step:
                moment = f"after step {step}, checkpoint {step_name(step)}"
            say(f"stopped {moment}; continue with --resume")

    def say_resumed(self) -> None:
        """Say where a resumed run continues."""
        if self._log is not None:
            step, steps = self.last_step, self._s.config.run.steps
            start = f"checkpoint {step_name(step)}" if step else "the start"
            say(f"continues from {start}: {step} of {steps} steps are done")

    def gives_up(self) -> bool:
        """True if `eval.stop_when_worse` ends the run here."""
        max_worse = self._s.config.eval.stop_when_worse
        return 0 < max_worse <= worse_in_a_row(self.evaluations.lines)

    def checkpoint(self, step: int, *, leaving: bool = False) -> None:
        """Save the state after `step` updates.

        leaving: wait until it is on disk. Errors: `UserError` if it cannot be written; without
        `leaving` that is a warning, and the next checkpoint is tried at its time.
        """
        if leaving and step == self._saved_step:
            self._settle_checkpoint(wait=True)
            if step == self._saved_step:  # writing it did not fail
                return
        about = {
            "method_state": self._s.method.state.model_dump(),
            BASE_SHA256: self._base_sha256,
        }
        if self._s.shards.adapters:
            about[LORA] = self._s.config.lora.model_dump(mode="json")
        in_background = self._s.config.checkpoint.asynchronous
        with self._watch.phase("checkpoint"):
            if leaving:
                self._s.checkpointer.save(step, about)
            else:
                self._s.checkpointer.start(step, about, in_background=in_background)
        self._saved_step = step
        self._call_on_checkpoint()  # `start` may have published the one before
        if not leaving and not in_background:
            self._settle_checkpoint(wait=True)

    def _settle_checkpoint(self, *, wait: bool) -> None:
        """Publish a checkpoint that was written in the background, or warn that it failed.

        wait: also if it is not yet on disk.
        """
        with self._watch.phase("checkpoint"):
            failure = self._s.checkpointer.finish(wait=wait)
        if failure:
            self._saved_step = _NOTHING_SAVED
            if self._log is not None:
                log.warning(
                    "%s; the older checkpoints stay, and the run continues", failure
                )
        self._call_on_checkpoint()

    def _call_on_checkpoint(self) -> None:
        """Call the callbacks if there is a new checkpoint; only rank 0 knows of any."""
        published = self._s.checkpointer.published
        if published is not None and published != self._published:
            self._published = published
            for callback in self._callbacks:
                callback.on_checkpoint(*published)

    def fail(self) -> None:
        """Finish writing the responses of a step whose loss was not finite, and the checkpoint
        before it: every rank is about to leave.
        """
        self.rollouts.finish()
        self._settle_checkpoint(wait=True)

    def finish(self, step: int) -> None:
        """Export the model after `step` updates as a Hugging Face directory with its card, and
        write summary.json.

        A run that gives up exports its best model, and leaves a checkpoint to continue from.
        """
        config = self._s.config
        num_worse = best_step = 0
        kept_step = self.evaluations.step_of_best_model()
        if step < config.run.steps:
            self.checkpoint(step, leaving=True)
            num_worse = worse_in_a_row(self.evaluations.lines)
            best_step = kept_step
        model_step = best_step or step
        summary: JsonObject = {}
        card = ""
        if self._log is not None:
            summary = summarize(
                config, self.evaluations.lines, step, model_step, kept_step
            )
            if num_worse:
                summary["worse_in_a_row"] = num_worse
            if step:
                card = model_card(summary, config, *self.evaluations.example())
        if best_step:
            copy_best(self._s, best_step, card)
        elif step:  # without a step the model is the base model
            write_final(self._s, card)
        drop_superseded(self._s, step, finished=True)
        (peak,) = max_over_world([peak_memory_bytes(self._s.device)])
        if self._log is None:
            return
        summary["peak_memory_bytes"] = int(peak)
        # With this file the run counts as finished.
        write_json(self._dir / "summary.json", summary)
        for level, text in closing_lines(summary, self.evaluations.lines, config):
            log.log(level, text)

    def close(self) -> None:
        """Flush the metrics writers and end threads, also when the run stops early."""
        self.rollouts.close()
        if self._log is not None:
            self._log.close()
