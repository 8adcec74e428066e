"""The batch of a step: judged responses or rows of fixed data, weighed by the method, packed for
this rank.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import mul

from megatron_opsft.data.mixture import ProblemSampler
from megatron_opsft.data.problems import shuffled_subset
from megatron_opsft.data.stored_responses import StoredResponses
from megatron_opsft.methods.facts import (
    Group,
    describe_lengths,
    describe_rollouts,
    select,
)
from megatron_opsft.methods.updates import Update, Weights, describe_weights
from megatron_opsft.models.architectures.shape import quadratic_at
from megatron_opsft.records import (
    NO_RANK,
    MicroBatch,
    Outcome,
    Problem,
    Response,
    StepResult,
)
from megatron_opsft.run.start.session import Session
from megatron_opsft.run.step.judged_problems import JudgedProblems, judge_problems
from megatron_opsft.run.step.token_penalty import with_token_penalty
from megatron_opsft.runtime.distributed import gather_from_all
from megatron_opsft.runtime.phase import Stopwatch
from megatron_opsft.trainer.batching.microbatch import Fetch, pack
from megatron_opsft.trainer.batching.packing import PackingReport
from megatron_opsft.trainer.model.optimizer import forget_moments
from megatron_opsft.trainer.model.passes import with_log_probs


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedBatch(JudgedProblems):
    """What a step trains on; the same on every rank but for its own rollouts and verdicts.

    responses: of the groups that the method keeps, or of the first ones where it keeps none;
    groups: the same by problem; weights: what the method makes of them, in the same order; sampled:
    all that were sampled for it, those of dropped groups included, and none with fixed data;
    refills: how often problems were drawn again; metrics: what else is to be said of it.
    """

    groups: Sequence[Group]
    weights: Weights
    sampled: Sequence[Response]
    refills: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def describe(self) -> dict[str, float | int]:
        """Metrics of the responses: of all that were sampled, also of those that the method drops.
        What nobody has judged, as fixed data, has no accuracy, and no limit.
        """
        weighed = describe_weights(self.groups, self.weights)
        if not self.sampled:
            return describe_lengths(self.responses) | weighed
        limit = max(group.limit for group in self.groups)
        return {
            **describe_rollouts(self.sampled, select(self.sampled, limit)),
            "refills": self.refills,
            "length_limit": limit,
            **weighed,
        }

    @property
    def trained(self) -> list[Response]:
        """Those that the update learns from."""
        return [
            r
            for r, kept in zip(self.responses, self.weights.trained, strict=True)
            if kept
        ]


def sample_batch(s: Session, step: int, watch: Stopwatch) -> JudgedBatch:
    """Responses to the step's problems, with verdicts. Called by every rank.

    A method may drop groups that teach nothing; problems are then drawn again for as often as it
    says, or until there are as many as in any step. Were all dropped, the batch is the first ones,
    and the step learns from none of them.
    """
    limit = s.config.method.limit(s.method.state) or s.settings.max_response_tokens
    wanted = s.config.data.prompts_per_step
    whole: JudgedProblems | None = None
    refills, more = -1, True
    counted = s.sampler.engine.spec_counts()
    while whole is None or more:
        refills += 1
        draw = s.method.first_draw(step) + refills
        judged = judge_problems(
            s,
            s.problems_of_draw(draw),
            watch,
            num_samples=s.config.rollout.group_size,
            limit=limit,
            seed_step=draw + 1,
        )
        whole = judged if whole is None else whole.followed_by(judged)
        groups = s.method.groups(whole.responses, whole.problems, limit)
        kept, more = s.method.fill(groups, wanted, refills)
    with watch.phase("rollout"):
        s.sampler.engine.sleep()
    # With none kept the first ones, for what is said of the step.
    groups = [groups[index] for index in kept] or groups[:wanted]
    weights = s.method.weigh(groups)
    if not kept:  # a divergence from the reference is nothing to train on alone
        weights = replace(weights, trained=(False,) * len(weights.trained))
    return JudgedBatch(
        problems=whole.problems,
        rollouts=whole.rollouts,
        verdicts=whole.verdicts,
        responses=[response for group in groups for response in group.responses],
        groups=groups,
        weights=weights,
        sampled=whole.responses,
        refills=refills,
        metrics=_spec_metrics(s, s.sampler.engine.spec_counts() - counted),
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


def pack_updates(
    s: Session, batch: JudgedBatch, watch: Stopwatch
) -> list[PackedUpdate]:
    """The optimizer steps on a batch, ready for the trainer. Called by every rank.

    With several updates the micro-batches carry the log-probs of the policy that sampled; with a
    divergence in the loss, those of the reference model; with one in the advantages, both.
    """
    penalty = s.trainer.objective.token_penalty
    with watch.phase("train"):
        updates = [
            pack_update(
                s,
                update,
                partial(s.fetch, batch.rollouts, batch.problems, update.responses),
            )
            for update in s.method.updates(batch.groups, batch.weights)
        ]
    packs: Sequence[Sequence[MicroBatch]] = [update.microbatches for update in updates]
    needs_old = len(updates) > 1 or penalty is not None
    if needs_old and s.stored is None:  # fixed data bring their own, where they matter
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
    s: Session, update: Update, fetch: Fetch, lengths: Sequence[int] | None = None
) -> PackedUpdate:
    """Every rank calls it with the same update; no micro-batch where nothing is trained on.

    lengths: the room that each response takes, if not that of its prompt and its tokens.
    """
    if not update.responses:
        return PackedUpdate(microbatches=[], factor=0.0, packing=PackingReport())
    is_plain = s.trainer.objective.is_weighted_likelihood
    products = map(mul, update.token_weights, update.advantages)
    microbatches, packing = pack(
        lengths or [response.sequence_tokens for response in update.responses],
        tuple(products) if is_plain else update.token_weights,
        fetch,
        advantages=None if is_plain else update.advantages,
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
    return PackedUpdate(
        microbatches=microbatches, factor=update.factor, packing=packing
    )


def whole_result(results: Sequence[StepResult]) -> StepResult:
    """Of a batch's updates: means of loss and gradient norm over those that were applied, of shares
    over their tokens; sums of counts.
    """
    applied = [result for result in results if result.applied] or results[:1]
    if len(applied) == 1:
        return applied[0]
    tokens = sum(result.trained_tokens for result in applied)

    def over_tokens(shares: Sequence[float | None]) -> float | None:
        found = [
            s * r.trained_tokens
            for s, r in zip(shares, applied, strict=True)
            if s is not None
        ]
        return sum(found) / tokens if found else None

    return replace(
        applied[0],
        loss=sum(result.loss for result in applied) / len(applied),
        grad_norm=sum(result.grad_norm for result in applied) / len(applied),
        trained_tokens=tokens,
        num_microbatches=sum(result.num_microbatches for result in applied),
        clip_share=over_tokens([r.clip_share for r in applied]),
        kl_mean=over_tokens([r.kl_mean for r in applied]),
    )


def stored_batch(s: Session, stored: StoredResponses, step: int) -> JudgedBatch:
    """The step's responses: as many as another method would sample, epoch after epoch in a new
    order. The engine, awake since the last update for evaluations alone, sleeps meanwhile.
    """
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
            unclosed_think=False,
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
        responses=responses,
        groups=groups,
        weights=s.method.weigh(groups),
        sampled=(),
    )
