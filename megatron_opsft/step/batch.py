"""The batch of a step: judged responses, weighed by the method, packed for this rank."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatron_opsft.architectures.flops import quadratic_at
from megatron_opsft.batching.microbatch import Fetch, pack
from megatron_opsft.batching.packing import PackingReport
from megatron_opsft.data.problems import shuffled_subset
from megatron_opsft.methods.batch import select
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.updates import Update, Weights
from megatron_opsft.model.optimizer import forget_moments
from megatron_opsft.model.passes import with_log_probs
from megatron_opsft.model.token_rewards import with_token_rewards
from megatron_opsft.records import MicroBatch, Response, Sample, StepResult
from megatron_opsft.runtime.distributed import gather_from_all
from megatron_opsft.runtime.stopwatch import Stopwatch
from megatron_opsft.session import Session
from megatron_opsft.step.judged_problems import JudgedProblems, join_draws, judge_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedBatch(JudgedProblems):
    """What a step trains on; the same on every rank but for its own rollouts and verdicts.

    responses: of the groups that the method keeps, or of the first ones where it keeps none;
    groups: the same by problem; weights: what the method makes of them, in the same order; fetch:
    (some of them, indices of these for each data-parallel rank) -> this rank's tokens, see
    `fetch_samples`; refills: how often problems were drawn again;
    spec_metrics: of `rollout.speculative`, where it is set.
    """

    groups: Sequence[Group]
    weights: Weights
    fetch: Callable[[Sequence[Response], Sequence[Sequence[int]]], Mapping[int, Sample]]
    refills: int = 0
    spec_metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def accepted(self) -> list[Response]:
        """Correct, finished, and no longer than the limit."""
        return select(self.responses, max(group.limit for group in self.groups))

    @property
    def trained(self) -> list[Response]:
        """Those that the update learns from."""
        return [r for r, kept in zip(self.responses, self.weights.trained, strict=True) if kept]


def sample_batch(s: Session, step: int, watch: Stopwatch) -> JudgedBatch:
    """Responses to the step's problems, with verdicts. Called by every rank.

    A method may drop groups that teach nothing; problems are then drawn again for as often as it
    says, or until there are as many as in any step. Were all dropped, the batch is the first ones,
    and the step learns from none of them.
    """
    limit = s.config.method.limit(s.method.state) or s.settings.max_response_tokens
    wanted = s.config.data.prompts_per_step
    parts: list[JudgedProblems] = []
    more = True
    counted = s.sampler.engine.spec_counts()
    while more:
        draw = s.method.first_draw(step) + len(parts)
        judged = judge_problems(
            s,
            s.problems_of_draw(draw),
            watch,
            num_samples=s.config.rollout.group_size,
            limit=limit,
            seed_step=draw + 1,
        )
        parts.append(judged)
        whole = join_draws(parts)
        groups = s.method.groups(whole.responses, whole.problems, limit)
        kept, more = s.method.fill(groups, wanted, len(parts) - 1)
    with watch.phase("rollout"):
        s.sampler.engine.sleep()
    responses = whole.responses
    learns = bool(kept)
    kept = kept or list(range(min(wanted, len(groups))))  # for what is said of the step
    if len(kept) < len(groups):
        groups = [groups[index] for index in kept]
        responses = [response for group in groups for response in group.responses]
    weights = s.method.weigh(groups)
    if not learns:  # a divergence from the reference is nothing to train on alone
        weights = replace(weights, trained=(False,) * len(weights.trained), factor=0.0)
    return JudgedBatch(
        problems=whole.problems,
        rollouts=whole.rollouts,
        verdicts=whole.verdicts,
        responses=responses,
        groups=groups,
        weights=weights,
        fetch=partial(s.fetch, whole.rollouts, whole.problems),
        refills=len(parts) - 1,
        spec_metrics=_spec_metrics(s, s.sampler.engine.spec_counts() - counted),
    )


def _spec_metrics(s: Session, mine: Counter[str]) -> dict[str, float]:
    """mine: what the engine of this rank has counted in the step. Called by every rank."""
    if s.config.rollout.speculative is None:
        return {}
    counts = sum(gather_from_all([mine]), Counter())
    return {
        "spec_acceptance": counts["accepted"] / max(counts["draft_tokens"], 1),
        "spec_tokens_per_draft": counts["accepted"] / max(counts["drafts"], 1),
    }


def begin_stage(s: Session) -> None:
    """Optimizer and reference model begin anew from the weights as they are."""
    forget_moments(s.trainer.optimizer)
    if s.reference is not None:
        s.reference.replace()


def observe_monitor(s: Session, watch: Stopwatch) -> None:
    """Let the method see its monitor problems, where it wants to. Called by every rank."""
    if (size := s.config.method.monitor_size(s.method.state)) is None:
        return
    problems = shuffled_subset(s.problems.problems, size[0], seed=0)
    limit = s.settings.max_response_tokens
    judged = judge_problems(
        s,
        problems,
        watch,
        num_samples=size[1],
        limit=limit,
        seed_step=-s.method.state.step,  # training draws count from 1, evaluations have step 0
    )
    s.method.observe(s.method.groups(judged.responses, problems, limit))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedUpdate:
    """This rank's part of an optimizer step; `factor`: of the whole batch's loss."""

    microbatches: Sequence[MicroBatch]
    factor: float
    packing: PackingReport


def pack_updates(s: Session, batch: JudgedBatch, watch: Stopwatch) -> list[PackedUpdate]:
    """The optimizer steps on a batch, ready for the trainer. Called by every rank.

    With several updates the micro-batches carry the log-probs of the policy that sampled; with a
    divergence in the loss, those of the reference model; with one in the rewards, both.
    """
    objective = s.trainer.objective
    with watch.phase("train"):
        updates = [
            pack_update(s, update, partial(batch.fetch, update.responses))
            for update in s.method.updates(batch.groups, batch.weights)
        ]
    needs_old = len(updates) > 1 or objective.reward_beta > 0
    if needs_old and s.stored is None:  # fixed data bring their own, where they matter
        with watch.phase("old_logprob"):
            updates = [
                replace(
                    update,
                    microbatches=with_log_probs(
                        update.microbatches,
                        s.trainer.score_batches(update.microbatches),
                        "old_log_probs_R",
                    ),
                )
                for update in updates
            ]
    if s.reference is not None:
        with watch.phase("reference"):
            updates = [
                replace(update, microbatches=s.reference.with_log_probs(update.microbatches))
                for update in updates
            ]
    if objective.reward_beta:
        paid = with_token_rewards([u.microbatches for u in updates], objective, s.layout)
        updates = [
            replace(update, microbatches=microbatches)
            for update, microbatches in zip(updates, paid, strict=True)
        ]
    return updates


def pack_update(s: Session, update: Update, fetch: Fetch) -> PackedUpdate:
    """Every rank calls it with the same update; no micro-batch where nothing is trained on."""
    if not update.responses:
        return PackedUpdate(microbatches=[], factor=0.0, packing=PackingReport())
    token_weights, advantages = update.token_weights, None
    if s.trainer.objective.is_weighted_likelihood:
        token_weights = tuple(
            weight * advantage
            for weight, advantage in zip(token_weights, update.advantages, strict=True)
        )
    else:
        advantages = update.advantages
    microbatches, packing = pack(
        [response.sequence_tokens for response in update.responses],
        token_weights,
        fetch,
        advantages=advantages,
        budget=s.config.train.max_tokens_per_microbatch,
        dp_rank=s.layout.dp_rank,
        dp_size=s.layout.dp_size,
        cp_rank=s.layout.cp_rank,
        cp_size=s.layout.cp_size,
        multiple=s.layout.pp_size if s.config.parallel.vpp else 1,
        align=s.layout.tp_size if s.config.parallel.sequence_parallel else 1,
        quadratic_at=quadratic_at(s.shards.table.shape),
        device=s.device.torch_device,
    )
    return PackedUpdate(microbatches=microbatches, factor=update.factor, packing=packing)


def whole_result(results: Sequence[StepResult]) -> StepResult:
    """Of a batch's updates: means of loss and gradient norm over those that were applied, of shares
    over their tokens; sums of counts.
    """
    applied = [result for result in results if result.applied] or results[:1]
    if len(applied) == 1:
        return applied[0]
    tokens = sum(result.trained_tokens for result in applied)
    return StepResult(
        applied=True,
        loss=sum(result.loss for result in applied) / len(applied),
        grad_norm=sum(result.grad_norm for result in applied) / len(applied),
        lr=applied[0].lr,
        trained_tokens=tokens,
        num_microbatches=sum(result.num_microbatches for result in applied),
        clip_share=_over_tokens([r.clip_share for r in applied], applied, tokens),
        kl_mean=_over_tokens([r.kl_mean for r in applied], applied, tokens),
    )


def _over_tokens(
    values: Sequence[float | None], results: Sequence[StepResult], tokens: int
) -> float | None:
    sums = [v * r.trained_tokens for v, r in zip(values, results, strict=True) if v is not None]
    return sum(sums) / tokens if sums else None
