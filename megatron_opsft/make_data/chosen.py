"""Fixed data that are some of the sampled responses, unchanged: CRST, off-policy SFT, O1-Pruner."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.make_data.draw import Draw, scores_of, stored_of
from megatron_opsft.methods.advantages import z_score
from megatron_opsft.methods.batch import select
from megatron_opsft.methods.catalog.o1_pruner import O1Pruner, against
from megatron_opsft.methods.facts import ReferenceStatistics
from megatron_opsft.records import Response


def shortest_correct(responses: Sequence[Response], texts: Sequence[str]) -> int | None:
    """CRST's: the correct, finished response of fewest tokens, the first of equal ones; None if
    there is none. Of equal texts only the first counts.
    """
    firsts = {text: index for index, text in reversed(list(enumerate(texts)))}
    usable = [i for i in firsts.values() if responses[i].correct and responses[i].finished]
    return min(usable, key=lambda i: (responses[i].num_tokens, i), default=None)


def crst_choice(facts: Sequence[Response], texts: Mapping[tuple[int, int], str]) -> list[Response]:
    """Of one problem: the shortest correct response, or none. texts: by rank and index."""
    index = shortest_correct(facts, [texts[each.rank, each.rollout_index] for each in facts])
    return [] if index is None else [facts[index]]


def crst_rows(draw: Draw) -> list[StoredResponse]:
    """The same on every rank."""
    texts = draw.texts()
    chosen = [f for _, facts in draw.by_problem for f in crst_choice(facts, texts)]
    return [stored_of(sample) for sample in draw.samples(chosen)]


def off_policy_rows(draw: Draw, limit: int) -> list[StoredResponse]:
    """All correct responses within the limit, the same on every rank."""
    return [stored_of(sample) for sample in draw.samples(select(draw.judged.responses, limit))]


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


def o1_rows(draw: Draw, settings: O1Pruner, temperature: float) -> list[StoredResponse]:
    """With rewards for advantages, and log-probs as the training's objective takes them; the same
    on every rank. temperature: of the log-probs.
    """
    seed = draw.session.config.run.seed
    chosen = [
        pair
        for problem, facts in draw.by_problem
        for pair in o1_choice(problem.id, facts, settings, seed)
    ]
    samples = draw.samples([facts for facts, _ in chosen])
    scores = scores_of(draw.session, samples, temperature=temperature)
    return [
        replace(stored_of(sample, reward), log_probs=log_probs)
        for sample, (_, reward), log_probs in zip(samples, chosen, scores, strict=True)
    ]


def with_z_scores(rows: Sequence[StoredResponse]) -> list[StoredResponse]:
    """The advantages of the whole data set as z-scores; population deviation."""
    if not rows:
        return []
    (advantages,) = z_score([[row.advantage for row in rows]])
    return [replace(row, advantage=a) for row, a in zip(rows, advantages, strict=True)]
