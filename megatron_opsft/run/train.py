"""On-policy SFT: sample from the current policy, keep what is correct and short, take one SFT step
on it.

The loop below is Algorithm 1 of the paper, and the loop of the methods it is compared with: the
method alone decides which responses are learned from, and how much. Every rank runs the loop; the
functions that it calls know what only some ranks do.
"""

from collections.abc import Sequence

from megatron_opsft.callback import Callback
from megatron_opsft.errors import NonFiniteError
from megatron_opsft.run.record.hub import push_to_hub
from megatron_opsft.run.record.open_recorder import open_recorder
from megatron_opsft.run.record.recorder import RunRecorder
from megatron_opsft.run.start.checked_run import CheckedRun
from megatron_opsft.run.start.session import Session, open_session
from megatron_opsft.run.step.batch import (
    begin_stage,
    observe_monitor,
    pack_updates,
    sample_batch,
    stored_batch,
    whole_result,
)
from megatron_opsft.run.step.sampled_log_probs import score_sampled
from megatron_opsft.run.step.sleep import push, wake_trainer
from megatron_opsft.run.step.teaching import pack_taught, without_long_pairs
from megatron_opsft.runtime.distributed import any_over_world
from megatron_opsft.runtime.launched import launched_rank
from megatron_opsft.runtime.phase import (
    REQUEUE_EXIT_CODE,
    StopSignal,
    Stopwatch,
    announce,
    enter_phase,
    heartbeat,
)
from megatron_opsft.trainer.batching.packing import whole_packing
from megatron_opsft.trainer.model.optimizer import learning_rate


def train(
    checked: CheckedRun,
    *,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Run `run.steps` steps; return the exit code of the process. Called by every rank.

    Exit codes: 0, finished; 75, stopped by a signal or the time limit with a checkpoint, to be
    started again with `resume`; 128 + n, stopped by signal n before the first step.
    callbacks: called on rank 0. Errors: `UserError` before anything is computed, `NothingLeft` for
    a resumed run that is finished, `NonFiniteError` with the step's responses in rollouts/.
    """
    config = checked.config
    stop = StopSignal(config.run.max_minutes)
    with heartbeat():
        with (
            open_session(checked, resume=resume) as s,
            open_recorder(
                s, resume=resume, overwrite=overwrite, callbacks=callbacks
            ) as recorder,
        ):
            announce("copying the weights into the rollout engine and comparing them")
            step = recorder.last_step
            push(s, step, s.probes(step), Stopwatch(s.device))
            stopping = recorder.evaluations.run_if_due(step, stop)
            while step < config.run.steps and not stopping and not recorder.gives_up():
                step += 1
                run_step(s, recorder, step)
                is_last = step == config.run.steps
                stopping = any_over_world(stop.requested) and not is_last
                leaving = is_last or stopping
                every = config.checkpoint.every
                if leaving or (every and step % every == 0):
                    recorder.checkpoint(step, leaving=leaving)
                stopping = stopping or recorder.evaluations.run_if_due(step, stop)
            if stopping:
                recorder.stop(step)
                return REQUEUE_EXIT_CODE if step else stop.unsaved_exit_code
            recorder.finish(step)
        # The other ranks are done, so that none of them waits for the upload.
        if launched_rank() == 0:
            push_to_hub(config)
    return 0


def run_step(s: Session, recorder: RunRecorder, step: int) -> None:
    """Sample one batch, take the optimizer step or steps on it, and record them."""
    enter_phase("prepare", step)
    watch = Stopwatch(s.device)
    if s.method.starts_stage:
        begin_stage(s)
    if s.reference is not None and s.method.refreshes_teacher:
        s.reference.replace()
    observe_monitor(s, watch)
    batch = (
        sample_batch(s, step, watch)
        if s.stored is None
        else stored_batch(s, s.stored, step)
    )
    wake_trainer(s, watch)
    if s.teacher is not None:
        batch = without_long_pairs(s, batch)
    recorder.rollouts.begin(step, batch, score_sampled(s, batch, watch))
    pack = pack_updates if s.teacher is None else pack_taught
    updates = pack(s, batch, watch)
    lr = learning_rate(step, s.config.run.steps, s.config.optimizer)
    with watch.phase("train"):
        try:
            results = [s.trainer.step(u.microbatches, u.factor, lr) for u in updates]
        except NonFiniteError:
            recorder.fail()
            raise
    s.method.advance(batch.groups, batch.refills)
    with watch.phase("sync"):
        probes = s.probes(step, batch.trained, batch.rollouts)
        synced = push(s, step, probes, watch)
    packing = whole_packing([update.packing for update in updates])
    recorder.record(step, batch, packing, whole_result(results), synced, watch)
