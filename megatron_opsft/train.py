"""On-policy SFT: sample from the current policy, keep what is correct and short, take one SFT step
on it.

The loop below is the paper's Algorithm 1. Every rank runs it; what a rank does alone is in the
called functions.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_opsft.architectures.flops import quadratic_at
from megatron_opsft.batching.exchange import Fetch
from megatron_opsft.batching.microbatch import pack
from megatron_opsft.batching.packing import NOTHING_PACKED, PackingReport
from megatron_opsft.config import Config
from megatron_opsft.errors import NonFiniteError, UserError
from megatron_opsft.methods.normalization import MODES, normalize
from megatron_opsft.methods.selection import select
from megatron_opsft.model.optimizer import learning_rate
from megatron_opsft.records import MicroBatch, ResponseFacts
from megatron_opsft.run.recorder import RunRecorder, open_recorder
from megatron_opsft.runtime.distributed import any_over_world
from megatron_opsft.runtime.phase import enter_phase
from megatron_opsft.runtime.stop_signal import REQUEUE_EXIT_CODE, StopSignal
from megatron_opsft.runtime.stopwatch import Stopwatch
from megatron_opsft.session import Session, open_session

log = logging.getLogger("megatron_opsft")


def train(config: Config, *, resume: bool = False, overwrite: bool = False) -> int:
    """Run `config.run.steps` steps; returns the process's exit code.

    0: finished; 75: stopped by a signal or the time limit with a checkpoint, to be started again
    with `resume`. Called by every rank. Errors: `UserError` before anything is computed,
    `NonFiniteError` with the batch saved.
    """
    if config.method.name != "on_policy_sft":
        raise UserError(f"method.name={config.method.name} cannot be trained with yet")
    stop = StopSignal(config.run.max_minutes)
    with (
        open_session(config, resume=resume) as s,
        open_recorder(s, resume=resume, overwrite=overwrite) as recorder,
    ):
        s.sync.push(recorder.last_step, s.probes(recorder.last_step))
        recorder.evaluate_if_due(recorder.last_step)
        for step in range(recorder.last_step + 1, config.run.steps + 1):
            run_step(s, recorder, step)
            last = step == config.run.steps
            stopping = any_over_world(stop.requested)
            every = config.checkpoint.every
            if last or stopping or (every and step % every == 0):
                recorder.checkpoint(step, leaving=last or stopping)
            if stopping and not last:
                return REQUEUE_EXIT_CODE
            recorder.evaluate_if_due(step)
        recorder.finish()
    return 0


def run_step(s: Session, recorder: RunRecorder, step: int) -> None:
    """One rollout batch and one update."""
    enter_phase("prepare", step)
    watch = Stopwatch(s.device)
    problems = s.problems_of(step)
    with watch.phase("rollout"):
        rollouts = s.sampler.sample(
            problems, s.settings, num_samples=s.config.rollout.group_size, step=step
        )
        s.sampler.engine.sleep()
    with watch.phase("verify"):
        verdicts = s.verifier.score(rollouts, {p.id: p.answer for p in problems})
        responses = s.share_facts(rollouts, verdicts, problems)
    recorder.begin_rollouts(step, rollouts, verdicts, responses)
    with watch.phase("train"):
        accepted = select(responses, s.config.rollout.max_response_tokens)
        lr = learning_rate(step, s.config.run.steps, s.config.optimizer)
        batch = make_batch(s, accepted, s.fetch(accepted, rollouts, problems))
        try:
            result = s.trainer.step(batch.microbatches, batch.factor, lr)
        except NonFiniteError:
            recorder.save_failed_batch(step, accepted, rollouts)
            raise
    with watch.phase("sync"):
        pushed = s.sync.push(step, s.probes(step, accepted, rollouts))
    recorder.record(step, responses, accepted, batch.packing, result, pushed, watch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """This rank's part of a global batch; `factor`: of the whole batch's loss."""

    microbatches: list[MicroBatch]
    factor: float
    packing: PackingReport


def make_batch(s: Session, accepted: Sequence[ResponseFacts], fetch: Fetch) -> Batch:
    """Every rank calls it with all accepted responses; no micro-batch if there is none."""
    if not accepted:
        return Batch(microbatches=[], factor=0.0, packing=NOTHING_PACKED)
    normalization = normalize(
        [response.num_response_tokens for response in accepted],
        s.num_rollouts,
        MODES[s.config.method.aggregation],
    )
    microbatches, packing = pack(
        [response.num_tokens for response in accepted],
        normalization.token_weights,
        fetch,
        budget=s.config.train.max_tokens_per_microbatch,
        dp_rank=s.layout.dp_rank,
        dp_size=s.layout.dp_size,
        multiple=s.layout.pp_size if s.config.parallel.vpp else 1,
        align=s.layout.tp_size if s.config.parallel.sequence_parallel else 1,
        quadratic_at=quadratic_at(s.shards.table.shape),
        device=s.device.torch_device,
    )
    return Batch(microbatches=microbatches, factor=normalization.factor, packing=packing)
