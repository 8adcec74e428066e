"""Sampled responses on every rank, their scores, and where in them the thinking is; and the fixed
data that are some of them, unchanged: CRST, off-policy SFT, O1-Pruner.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby
from operator import attrgetter
from statistics import fmean
from typing import Any

from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.errors import NonFiniteError
from megatron_opsft.methods.catalog.o1_pruner import O1Pruner
from megatron_opsft.methods.facts import THINK, THINK_END, ReferenceStatistics, select
from megatron_opsft.records import Response, Sample
from megatron_opsft.run.start.session import Session
from megatron_opsft.run.step.judged_problems import JudgedProblems
from megatron_opsft.runtime.parts import in_parts
from megatron_opsft.runtime.phase import Stopwatch


def samples_of(
    s: Session, judged: JudgedProblems, chosen: Sequence[Response]
) -> list[Sample]:
    """The tokens of the chosen responses, in order, on every rank; called by every rank."""
    if not chosen:
        return []
    everything = [range(len(chosen))] * s.layout.dp_size
    found = s.fetch(judged.rollouts, judged.problems, chosen, everything)
    return [found[index] for index in range(len(chosen))]


def scores_of(
    s: Session,
    samples: Sequence[Sample],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> list[tuple[float, ...]]:
    """See `Trainer.score`, in passes of as many tokens as the training step's.

    Errors: `NonFiniteError`, before anything is chosen by scores that cannot be compared.
    """
    budget = s.config.train.max_tokens_per_microbatch * s.layout.cp_size
    with Stopwatch(s.device).phase("score"):
        found = [
            scores
            for part in in_parts(samples, _num_tokens, budget)
            for scores in s.trainer.score(
                part, temperature=temperature, entropy=entropy
            )
        ]
    if not all(math.isfinite(score) for scores in found for score in scores):
        raise NonFiniteError(
            "the model's log-probs of its own responses are NaN or infinite"
        )
    return found


def _num_tokens(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)


def find_thinking(texts: Sequence[str]) -> slice | None:
    """The tokens of the thinking, without tags; None where no thinking ends.

    texts: of each token of a response. A tag may be several tokens; one that shares a token with
    other text takes all of it.
    """
    whole, ends = "".join(texts), list(accumulate(map(len, texts)))
    closing = whole.find(THINK_END)
    if closing < 0:
        return None
    opening = whole.find(THINK, 0, closing)
    # The token that a character is in is the first that ends behind it.
    start = 0 if opening < 0 else bisect_right(ends, opening + len(THINK) - 1) + 1
    return slice(start, max(start, bisect_right(ends, closing)))


def row_of(sample: Sample, **own: Any) -> StoredResponse:
    """A response as it is, but for `own`."""
    names = ("problem_id", "prompt_ids", "response_ids")
    return StoredResponse(**{name: getattr(sample, name) for name in names} | own)


def rows_of(
    s: Session, judged: JudgedProblems, chosen: Sequence[Response]
) -> list[StoredResponse]:
    """The chosen responses as they are, the same on every rank."""
    return list(map(row_of, samples_of(s, judged, chosen)))


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
        for pair in o1_choice(
            judged.problems[index].id, [*facts], settings, s.config.run.seed
        )
    ]
    samples = samples_of(s, judged, [facts for facts, _ in chosen])
    scores = scores_of(s, samples, temperature=temperature)
    return [
        row_of(sample, advantage=reward, log_probs=log_probs)
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
    rewards = settings.against(reference, facts)
    count = min(settings.samples_kept, len(facts))
    kept = random.Random(f"o1_pruner:{seed}:{problem_id}").sample(
        range(len(facts)), count
    )
    return [(facts[index], rewards[index]) for index in sorted(kept)]
