"""Fixed data that are some of the sampled responses, unchanged: CRST, off-policy SFT, O1-Pruner."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from statistics import fmean

from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.make_data.samples import samples_of, scores_of
from megatron_opsft.methods.advantages import z_score
from megatron_opsft.methods.catalog.o1_pruner import O1Pruner, against
from megatron_opsft.methods.facts import ReferenceStatistics, select
from megatron_opsft.records import Response
from megatron_opsft.session import Session
from megatron_opsft.step.judged_problems import JudgedProblems


def rows_of(s: Session, judged: JudgedProblems, chosen: Sequence[Response]) -> list[StoredResponse]:
    """The chosen responses as they are, the same on every rank."""
    return [
        StoredResponse(
            problem_id=sample.problem_id,
            prompt_ids=sample.prompt_ids,
            response_ids=sample.response_ids,
        )
        for sample in samples_of(s, judged, chosen)
    ]


def shortest(responses: Sequence[Response], limit: int) -> list[Response]:
    """CRST's of each problem: the correct, finished response of fewest tokens, the first of equal
    ones; none of a problem without one.
    """
    by_problem = groupby(select(responses, limit), key=attrgetter("problem_index"))
    return [min(found, key=attrgetter("num_tokens")) for _, found in by_problem]


def o1_rows(
    s: Session, judged: JudgedProblems, settings: O1Pruner, temperature: float
) -> list[StoredResponse]:
    """With rewards for advantages, and log-probs as the training's objective takes them; the same
    on every rank. temperature: of the log-probs.
    """
    chosen = [
        pair
        for index, facts in groupby(judged.responses, key=attrgetter("problem_index"))
        for pair in o1_choice(judged.problems[index].id, [*facts], settings, s.config.run.seed)
    ]
    samples = samples_of(s, judged, [facts for facts, _ in chosen])
    scores = scores_of(s, samples, temperature=temperature)
    return [
        StoredResponse(
            problem_id=sample.problem_id,
            prompt_ids=sample.prompt_ids,
            response_ids=sample.response_ids,
            advantage=reward,
            log_probs=log_probs,
        )
        for sample, (_, reward), log_probs in zip(samples, chosen, scores, strict=True)
    ]


def o1_choice(
    problem_id: str, facts: Sequence[Response], settings: O1Pruner, seed: int
) -> list[tuple[Response, float]]:
    """Of one problem: some of its responses at random, with their rewards against the mean length
    and accuracy of all.
    """
    reference = ReferenceStatistics(
        mean_tokens=fmean(each.num_tokens for each in facts),
        accuracy=fmean(each.correct for each in facts),
    )
    rewards = against(reference, facts, settings)
    count = min(settings.samples_kept, len(facts))
    kept = random.Random(f"o1_pruner:{seed}:{problem_id}").sample(range(len(facts)), count)
    return [(facts[index], rewards[index]) for index in sorted(kept)]


def with_z_scores(rows: Sequence[StoredResponse]) -> list[StoredResponse]:
    """The advantages of the whole data set as z-scores; population deviation."""
    (advantages,) = z_score([[row.advantage for row in rows]])
    return [replace(row, advantage=a) for row, a in zip(rows, advantages, strict=True)]
