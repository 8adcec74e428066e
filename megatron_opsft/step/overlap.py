"""Training on a step's accepted responses while others are still being decoded.

A response that is correct and short enough is accepted whatever becomes of the others, and its
weight is its own; only the factor of the batch needs them all. So gradients are added up as enough
accepted responses for a micro-batch have come in, unnormalised and on each rank alone, and the
factor, the exchange between ranks and the update come with the last of them. Nothing is off-policy:
the weights change when all is decoded, as ever. That holds for on-policy SFT alone: what another
method makes of a response depends on its group.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megatron_opsft.methods.aggregation import aggregate
from megatron_opsft.methods.batch import select
from megatron_opsft.methods.updates import Update
from megatron_opsft.records import Problem, ResponseFacts, Rollout, Verdict
from megatron_opsft.runtime.distributed import any_over_world
from megatron_opsft.runtime.stopwatch import Stopwatch
from megatron_opsft.session import Session
from megatron_opsft.step.batch import pack_update
from megatron_opsft.step.judged_problems import Asked, JudgedProblems

_LOOK_SECONDS = 0.25  # between looks at what has come in, of all ranks together


def judge_while_training(s: Session, asked: Asked, watch: Stopwatch) -> JudgedProblems:
    """`judge_problems`, with the gradients of most accepted responses added up; called by every
    rank, with separate engines.
    """
    problems, limit = asked.problems, asked.limit
    settings = replace(s.settings, max_response_tokens=limit)
    by_id = {problem.id: problem for problem in problems}
    sampling = s.sampler.begin(
        problems,
        settings,
        num_samples=asked.num_samples,
        step=asked.seed_step,
        encode=asked.encode or s.prompt_of,
    )
    held: list[Rollout] = []
    verdicts: list[Verdict] = []
    num_held: Counter[int] = Counter()  # of each rank
    waiting: list[ResponseFacts] = []
    added: set[tuple[int, int]] = set()
    more = True
    while more:
        with watch.phase("rollout"):
            new, is_through = sampling.take(_LOOK_SECONDS)
        with watch.phase("verify"):
            judged = s.verifier.score(new, by_id)
            facts = s.share_facts(new, judged, problems)
        held += new
        verdicts += judged
        waiting += select([r._replace(slot=r.slot + num_held[r.rank]) for r in facts], limit)
        num_held.update(response.rank for response in facts)
        if not any_over_world(not is_through):
            with watch.phase("rollout"):
                more = sampling.recover()
        elif (ready := _enough(s, waiting)) is not None:
            with watch.phase("train"):
                _add(s, ready, held, problems, limit)
            added.update((response.place, response.sample_index) for response in ready)
            waiting = waiting[len(ready) :]
    return JudgedProblems(
        problems=problems,
        rollouts=held,
        verdicts=verdicts,
        responses=s.share_facts(held, verdicts, problems),
        added=frozenset(added),
    )


def _enough(s: Session, waiting: Sequence[ResponseFacts]) -> list[ResponseFacts] | None:
    """The first ones that fill a micro-batch of every data-parallel rank, or None. One is always
    left: the last pass of a step has something to do.
    """
    wanted = s.layout.dp_size * s.layout.cp_size * s.config.train.max_tokens_per_microbatch
    tokens = 0
    for number, response in enumerate(waiting[:-1], start=1):
        tokens += response.num_tokens
        if tokens >= wanted:
            return list(waiting[:number])
    return None


def _add(
    s: Session,
    responses: Sequence[ResponseFacts],
    held: Sequence[Rollout],
    problems: Sequence[Problem],
    limit: int,
) -> None:
    name = s.method.settings.aggregation
    lengths = [response.num_response_tokens for response in responses]
    token_weights, _ = aggregate(name, lengths, [True] * len(lengths), limit)
    update = Update(
        responses=tuple(responses),
        token_weights=token_weights,
        advantages=(1.0,) * len(responses),
        factor=1.0,
    )
    s.trainer.add(pack_update(s, update, s.fetch(responses, held, problems)).microbatches)
