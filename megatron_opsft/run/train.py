"""On-policy SFT: sample from the current policy, keep what is correct and short, take one SFT step
on it.

The loop below is the paper's Algorithm 1, and that of the methods it is compared with: which
responses are learned from, and how much, is the method's affair. Every rank runs it; what a rank
does alone is in the called functions.
"""

import logging
from collections.abc import Sequence

from megatron_opsft.config import Config
from megatron_opsft.errors import NonFiniteError
from megatron_opsft.records import Callback
from megatron_opsft.run.record.recorder import RunRecorder, open_recorder
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
from megatron_opsft.run.step.teaching import pack_taught, without_long_pairs
from megatron_opsft.runtime.distributed import any_over_world
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

log = logging.getLogger("megatron_opsft")


def train(
    config: Config,
    *,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Run `config.run.steps` steps; returns the process's exit code.

    0: finished; 75: stopped by a signal or the time limit with a checkpoint, to be started again
    with `resume`; 128 + n: stopped by signal n before the first step. Called by every rank. Errors:
    `UserError` before anything is computed, `NothingLeft` for a resumed run that is finished,
    `NonFiniteError` with the step's responses in rollouts/. callbacks: hear of it on rank 0.
    """
    stop = StopSignal(config.run.max_minutes)
    with (
        heartbeat(),
        open_session(config, resume=resume) as s,
        open_recorder(
            s, resume=resume, overwrite=overwrite, callbacks=callbacks
        ) as recorder,
    ):
        announce("copying the weights into the rollout engine and comparing them")
        s.sync.push(recorder.last_step, s.probes(recorder.last_step))
        step = recorder.last_step
        stopping = recorder.look(step, stop)
        while step < config.run.steps and not stopping and not recorder.gives_up():
            step += 1
            run_step(s, recorder, step)
            last = step == config.run.steps
            stopping = any_over_world(stop.requested) and not last
            every = config.checkpoint.every
            if last or stopping or (every and step % every == 0):
                recorder.checkpoint(step, leaving=last or stopping)
            stopping = stopping or recorder.look(step, stop)
        if stopping:
            recorder.stop(step)
            return REQUEUE_EXIT_CODE if step else stop.unsaved_exit_code
        recorder.finish(step)
    return 0


def run_step(s: Session, recorder: RunRecorder, step: int) -> None:
    """One rollout batch and the update on it, or several."""
    enter_phase("prepare", step)
    watch = Stopwatch(s.device)
    if s.config.method.starts_stage(s.method.state):
        begin_stage(s)
    if s.reference is not None and s.config.method.refreshes_teacher(s.method.state):
        s.reference.replace()
    observe_monitor(s, watch)
    batch = (
        sample_batch(s, step, watch)
        if s.stored is None
        else stored_batch(s, s.stored, step)
    )
    if s.teacher is not None:
        batch = without_long_pairs(s, batch)
    recorder.begin_rollouts(step, batch, score_sampled(s, batch, watch))
    packed = pack_updates if s.teacher is None else pack_taught
    updates = packed(s, batch, watch)
    lr = learning_rate(step, s.config.run.steps, s.config.optimizer)
    with watch.phase("train"):
        try:
            results = [s.trainer.step(u.microbatches, u.factor, lr) for u in updates]
        except NonFiniteError:
            recorder.fail()
            raise
    s.method.advance(batch.groups, batch.refills)
    with watch.phase("sync"):
        pushed = s.sync.push(step, s.probes(step, batch.trained, batch.rollouts))
    packing = whole_packing([update.packing for update in updates])
    recorder.record(step, batch, packing, whole_result(results), pushed, watch)
