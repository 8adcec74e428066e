"""Makes the batch of a step: responses, judged or from fixed data, weighed by the method and packed
into micro-batches for this rank.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import chain
from operator import mul

from megatron_opsft.data.mixture import ProblemSampler
from megatron_opsft.data.problems import shuffled_subset
from megatron_opsft.data.stored_responses import StoredResponses
from megatron_opsft.methods.facts import (
    Group,
    describe_lengths,
    describe_rollouts,
    describe_token_use,
)
from megatron_opsft.methods.updates import Credits, Update, describe_credits
from megatron_opsft.models.architectures.shape import quadratic_at
from megatron_opsft.records import (
    NO_RANK,
    MicroBatch,
    Outcome,
    Problem,
    Response,
    Sample,
    StepResult,
    record,
)
from megatron_opsft.run.start.session import Session
from megatron_opsft.run.step.judged_problems import JudgedProblems, judge_problems
from megatron_opsft.run.step.token_penalty import with_token_penalty
from megatron_opsft.runtime.distributed import gather_from_all
from megatron_opsft.runtime.phase import Stopwatch
from megatron_opsft.trainer.batching.microbatch import pack, plan_packs
from megatron_opsft.trainer.batching.packing import PackingReport
from megatron_opsft.trainer.model.optimizer import forget_moments
from megatron_opsft.trainer.model.passes import with_log_probs


@record
class JudgedBatch(JudgedProblems):
    """The batch that a step trains on; the same on every rank, except for rollouts and verdicts.

    Its responses are those of the groups that the method keeps; of the first groups if it keeps
    none.
    """

    groups: Sequence[Group]
    """`responses` by problem, in the same order."""
    credits: Credits
    """The method's rewards and advantages of `responses`, in the same order."""
    sampled: Sequence[Response]
    """All responses that were sampled, those of dropped groups too; none with fixed data."""
    refills: int = 0
    """How often problems were drawn again."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """More metrics of the step, by their key in metrics.jsonl."""

    def describe(self) -> dict[str, float | int]:
        """Return metrics of all sampled responses, also of those that the method drops.

        Fixed data, which nobody has judged, have no accuracy and no limit.
        """
        of_method = describe_credits(self.credits)
        if not self.sampled:
            return describe_lengths(self.responses) | of_method
        limit = max(group.limit for group in self.groups)
        return {
            **describe_rollouts(self.sampled, limit),
            **describe_token_use(self.sampled),
            "refills": self.refills,
            "length_limit": limit,
            **of_method,
        }

    @property
    def trained(self) -> list[Response]:
        """The responses that the update learns from."""
        credits = chain.from_iterable(self.credits)
        return [credit.response for credit in credits if credit.is_trained]


def sample_batch(s: Session, step: int, watch: Stopwatch) -> JudgedBatch:
    """Sample and judge responses to the problems of a step. Called by every rank.

    A method may drop groups that teach nothing. Problems are then drawn again, as often as the
    method allows, until the batch has its usual number of groups. If all groups are dropped, the
    batch is the first ones, and the step learns from none of them.
    """
    limit = s.method.limit or s.settings.max_response_tokens
    num_groups = s.config.data.prompts_per_step
    counts_before = s.sampler.engine.spec_counts()
    sampled: JudgedProblems | None = None
    refills = 0
    while True:
        draw = s.method.first_draw(step) + refills
        judged = judge_problems(
            s,
            s.problems_of_draw(draw),
            watch,
            num_samples=s.config.rollout.group_size,
            limit=limit,
            seed_step=draw + 1,
        )
        sampled = judged if sampled is None else sampled.followed_by(judged)
        groups = s.method.groups(sampled.responses, sampled.problems, limit)
        chosen, draws_again = s.method.fill(groups, num_groups, refills)
        if not draws_again:
            break
        refills += 1
    with watch.phase("rollout"):
        s.sampler.engine.sleep()
    if chosen:
        groups = [groups[index] for index in chosen]
        credits = s.method.credit(groups)
    else:
        # The first groups only describe the step: it does not learn from their divergence from a
        # reference model either.
        groups = groups[:num_groups]
        credits = []
        for group in s.method.credit(groups):
            credits.append([replace(credit, is_trained=False) for credit in group])
    return JudgedBatch(
        problems=sampled.problems,
        rollouts=sampled.rollouts,
        verdicts=sampled.verdicts,
        token_uses=sampled.token_uses,
        responses=[response for group in groups for response in group.responses],
        groups=groups,
        credits=credits,
        sampled=sampled.responses,
        refills=refills,
        metrics=_spec_metrics(s, s.sampler.engine.spec_counts() - counts_before),
    )


def _spec_metrics(s: Session, counts_here: Counter[str]) -> dict[str, float]:
    """Return the metrics of speculative decoding, if it is used. Called by every rank.

    counts_here: what the engine of this rank counted in the step, see `RolloutEngine.spec_counts`.
    """
    if s.config.rollout.speculative is None:
        return {}
    counts = sum(gather_from_all([counts_here]), Counter())
    return {
        "spec_acceptance": counts["accepted"] / max(counts["draft_tokens"], 1),
        "spec_tokens_per_draft": counts["accepted"] / max(counts["drafts"], 1),
    }


def begin_stage(s: Session) -> None:
    """Start the optimizer's moments and the reference model anew from the current weights."""
    forget_moments(s.trainer.optimizer, s.offload.stored)
    if s.reference is not None:
        s.reference.replace()


def observe_monitor(s: Session, watch: Stopwatch) -> None:
    """Sample the monitor problems if the method wants to see them now. Called by every rank."""
    monitor_size = s.method.monitor_size
    if monitor_size is None:
        return
    num_problems, num_samples = monitor_size
    problems = shuffled_subset(s.problems.problems, num_problems, seed=0)
    limit = s.settings.max_response_tokens
    judged = judge_problems(
        s,
        problems,
        watch,
        num_samples=num_samples,
        limit=limit,
        # Positive numbers are the seeds of training draws, 0 is that of evaluations.
        seed_step=-s.method.state.step,
    )
    s.method.observe(s.method.groups(judged.responses, problems, limit))


@record
class PackedUpdate:
    """The micro-batches of an optimizer step on this rank."""

    microbatches: Sequence[MicroBatch] = field(default_factory=list)
    indices: Sequence[Sequence[int]] = field(default_factory=list)
    """The responses in each micro-batch, in its order: indices into `Update.responses`."""
    factor: float = 0.0
    """Factor of the loss, summed over the micro-batches of all ranks."""
    packing: PackingReport = field(default_factory=PackingReport)


def pack_updates(
    s: Session, batch: JudgedBatch, watch: Stopwatch
) -> list[PackedUpdate]:
    """Pack the optimizer steps on a batch for the trainer. Called by every rank.

    If there are several steps, the micro-batches carry the log-probs of the policy that sampled; if
    the loss has a divergence, those of the reference model; if the advantages have one, both.
    """
    penalty = s.trainer.objective.token_penalty
    with watch.phase("train"):
        updates = []
        for update in s.method.updates(batch.groups, batch.credits):
            packed, _ = pack_update(s, batch, update)
            updates.append(packed)
    packs: Sequence[Sequence[MicroBatch]] = [update.microbatches for update in updates]
    needs_old = len(updates) > 1 or penalty is not None
    # Fixed data bring the log-probs of the policy that sampled, if they matter.
    if needs_old and s.stored is None:
        with watch.phase("old_logprob"):
            packs = [
                with_log_probs(pack, s.trainer.score_batches(pack), "old_log_probs_R")
                for pack in packs
            ]
    if s.reference is not None:
        with watch.phase("reference"):
            packs = [s.reference.with_log_probs(pack) for pack in packs]
    if penalty is not None:
        packs = with_token_penalty(packs, penalty, s.layout)
    return [
        replace(update, microbatches=pack)
        for update, pack in zip(updates, packs, strict=True)
    ]


def pack_update(
    s: Session,
    batch: JudgedBatch,
    update: Update,
    lengths: Sequence[int] | None = None,
) -> tuple[PackedUpdate, Mapping[int, Sample]]:
    """Pack one optimizer step; an update without responses has no micro-batch.

    Returns also the samples in this rank's micro-batches, by index: the caller decides how long
    they are kept.
    lengths: the tokens that each response takes in a pack, by default those of its prompt and its
    own. Called by every rank with the same update.
    """
    if not update.responses:
        return PackedUpdate(), {}
    if lengths is None:
        lengths = [response.sequence_tokens for response in update.responses]
    plan, packing = plan_packs(
        lengths,
        s.config.parallel,
        budget=s.config.train.max_tokens_per_microbatch,
        dp_size=s.layout.dp_size,
        quadratic_at=quadratic_at(s.shards.table.shape),
    )
    indices_of = [list(chain.from_iterable(packs)) for packs in plan]
    samples = s.fetch(batch.rollouts, batch.problems, update.responses, indices_of)
    indices = plan[s.layout.dp_rank]
    packed = PackedUpdate(
        microbatches=build_microbatches(s, update, indices, samples),
        indices=indices,
        factor=update.factor,
        packing=packing,
    )
    return packed, samples


def build_microbatches(
    s: Session,
    update: Update,
    indices: Sequence[Sequence[int]],
    samples: Mapping[int, Sample],
) -> list[MicroBatch]:
    """Build the micro-batches of an update on this rank.

    indices: see `PackedUpdate`. samples: by index.
    """
    weights, advantages = update.token_weights, update.advantages
    takes_product = s.trainer.objective.is_weighted_likelihood
    if takes_product:
        weights = tuple(map(mul, weights, advantages))
    return pack(
        indices,
        samples,
        weights,
        s.config.parallel,
        advantages=None if takes_product else advantages,
        cp_rank=s.layout.cp_rank,
        device=s.device.torch_device,
    )


def whole_result(results: Sequence[StepResult]) -> StepResult:
    """Summarize the updates on a batch, over those that were applied.

    Loss and gradient norm are means over updates, shares means over tokens, counts are sums.
    """
    applied = [result for result in results if result.applied] or results[:1]
    if len(applied) == 1:
        return applied[0]
    tokens = sum(result.trained_tokens for result in applied)

    def mean_over_tokens(shares: Sequence[float | None]) -> float | None:
        weighted = [
            share * result.trained_tokens
            for share, result in zip(shares, applied, strict=True)
            if share is not None
        ]
        return sum(weighted) / tokens if weighted else None

    return replace(
        applied[0],
        loss=sum(result.loss for result in applied) / len(applied),
        grad_norm=sum(result.grad_norm for result in applied) / len(applied),
        trained_tokens=tokens,
        num_microbatches=sum(result.num_microbatches for result in applied),
        clip_share=mean_over_tokens([result.clip_share for result in applied]),
        kl_mean=mean_over_tokens([result.kl_mean for result in applied]),
    )


def stored_batch(s: Session, stored: StoredResponses, step: int) -> JudgedBatch:
    """Take the next responses of fixed data, as many as another method would sample.

    Every epoch has an order of its own.
    """
    # The last weight sync woke the engine, for evaluations alone.
    s.sampler.engine.sleep()
    order = ProblemSampler(
        members=(range(len(stored)),),
        weights=(1.0,),
        batch_size=s.config.data.prompts_per_step * s.config.rollout.group_size,
        seed=s.config.run.seed,
    )
    rows = order.indices(s.method.first_draw(step))
    responses = [
        Response(
            problem_index=index,
            sample_index=0,
            num_prompt_tokens=stored.num_prompt_tokens[row],
            num_tokens=stored.num_response_tokens[row],
            outcome=Outcome.CORRECT,
            finished=True,
            rank=NO_RANK,
            rollout_index=row,
            advantage=stored.advantages[row],
        )
        for index, row in enumerate(rows)
    ]
    problems = [Problem(id=stored.problem_ids[row], text="", answer="") for row in rows]
    groups = s.method.groups(responses, problems, max(r.num_tokens for r in responses))
    return JudgedBatch(
        problems=problems,
        rollouts=[],
        verdicts=[],
        token_uses=[],
        responses=responses,
        groups=groups,
        credits=s.method.credit(groups),
        sampled=(),
    )
