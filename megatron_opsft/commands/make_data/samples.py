"""Sampled responses with their scores, and rows of fixed data that are responses as they were
sampled: CRST, off-policy SFT, O1-Pruner.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, groupby
from operator import attrgetter, methodcaller
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.errors import NonFiniteError
from megatron_opsft.methods.catalog.o1_pruner import O1Pruner
from megatron_opsft.methods.facts import Group, ReferenceStatistics, select
from megatron_opsft.records import THINK, THINK_END, LengthOf, Response, Sample
from megatron_opsft.run.start.session import Session
from megatron_opsft.run.step.judged_problems import JudgedProblems
from megatron_opsft.runtime.parts import in_parts
from megatron_opsft.runtime.phase import Stopwatch


def collect_rows(
    s: Session, judged: JudgedProblems, chosen: Sequence[Response]
) -> list[StoredResponse]:
    """Return the chosen responses unchanged, in their order, the same on every rank. Called by
    every rank.
    """
    if not chosen:
        return []
    indices = range(len(chosen))
    indices_of = [indices] * s.layout.dp_size  # every rank gets all of them
    samples = s.fetch(judged.rollouts, judged.problems, chosen, indices_of)
    rows = []
    for index in indices:
        sample = samples[index]
        rows.append(
            StoredResponse(
                problem_id=sample.problem_id,
                prompt_ids=sample.prompt_ids,
                response_ids=sample.response_ids,
                routing=sample.routing,
            )
        )
    return rows


def scores_of(
    s: Session,
    samples: Sequence[Sample],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> list[tuple[float, ...]]:
    """Score the samples with `Trainer.score`, in passes of as many tokens as a training step's.

    Errors: `NonFiniteError` for a score that is NaN or infinite: nothing can be chosen by it.
    """
    scores: list[tuple[float, ...]] = []
    budget = s.config.train.max_tokens_per_microbatch * s.layout.cp_size
    with Stopwatch(s.device).phase("score"):
        for batch in in_parts(samples, attrgetter("sequence_tokens"), budget):
            scores += s.trainer.score(batch, temperature=temperature, entropy=entropy)
    if not all(map(math.isfinite, chain.from_iterable(scores))):
        raise NonFiniteError(
            "the model's log-probs of its own responses are NaN or infinite"
        )
    return scores


def token_texts(tokenizer: PreTrainedTokenizerBase, row: StoredResponse) -> list[str]:
    """Return the text of each token of a response."""
    return [tokenizer.decode([token]) for token in row.response_ids]


def find_thinking(texts: Sequence[str]) -> slice | None:
    """Return which tokens of a response are its thinking, without tags; None if no thinking ends.

    texts: the text of each token. A tag may be several tokens; a token that contains a part of a
    tag does not belong to the thinking.
    """
    text = "".join(texts)
    token_ends = list(accumulate(map(len, texts)))
    closing = text.find(THINK_END)
    if closing < 0:
        return None
    opening = text.find(THINK, 0, closing)
    start = 0
    # A character is in the first token that ends after it.
    if opening >= 0:
        last_of_tag = bisect_right(token_ends, opening + len(THINK) - 1)
        start = last_of_tag + 1
    first_of_end_tag = bisect_right(token_ends, closing)
    return slice(start, max(start, first_of_end_tag))


def shortest(
    responses: Sequence[Response], limit: int, length_of: LengthOf
) -> list[Response]:
    """Choose CRST's responses: for each problem the shortest correct one that ended within `limit`
    tokens; the first of equally short ones.
    """
    by_problem = groupby(select(responses, limit), key=attrgetter("problem_index"))
    length = methodcaller("length", length_of)
    return [min(group, key=length) for _, group in by_problem]


def o1_rows(
    s: Session, judged: JudgedProblems, settings: O1Pruner
) -> list[StoredResponse]:
    """Return O1-Pruner's rows: some responses to each problem, their rewards as advantages, and
    their log-probs at the loss's temperature. The same on every rank; called by every rank.
    """
    chosen: list[tuple[Response, float]] = []
    by_problem = groupby(judged.responses, key=attrgetter("problem_index"))
    for problem_index, group in by_problem:
        problem_id = judged.problems[problem_index].id
        chosen += o1_choice(problem_id, list(group), settings, s.config.run.seed)
    rows = collect_rows(s, judged, [response for response, _ in chosen])
    temperature = settings.objective(s.settings.temperature).temperature
    scores = scores_of(s, rows, temperature=temperature)
    return [
        replace(row, advantage=reward, log_probs=log_probs)
        for row, (_, reward), log_probs in zip(rows, chosen, scores, strict=True)
    ]


def o1_choice(
    problem_id: str, facts: Sequence[Response], settings: O1Pruner, seed: int
) -> list[tuple[Response, float]]:
    """Draw `samples_kept` of a problem's responses, and return them in order, each with its reward.

    facts: all responses to the problem; rewards compare with their mean length and accuracy.
    """
    longest = max(response.num_tokens for response in facts)
    group = Group(responses=facts, limit=longest, length_of=settings.length_of)
    reference = ReferenceStatistics(
        mean_tokens=fmean(group.lengths), accuracy=group.pass_rate
    )
    rewards = settings.against(reference, group)
    count = min(settings.samples_kept, len(facts))
    generator = random.Random(f"o1_pruner:{seed}:{problem_id}")
    indices = generator.sample(range(len(facts)), count)
    return [(facts[index], rewards[index]) for index in sorted(indices)]
