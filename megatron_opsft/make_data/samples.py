"""Sampled responses on every rank, their scores, and where in them the thinking is."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from megatron_opsft.errors import NonFiniteError
from megatron_opsft.methods.facts import THINK, THINK_END
from megatron_opsft.records import Response, Sample
from megatron_opsft.runtime.phase import Stopwatch
from megatron_opsft.session import Session
from megatron_opsft.step.judged_problems import JudgedProblems


def samples_of(s: Session, judged: JudgedProblems, chosen: Sequence[Response]) -> list[Sample]:
    """The tokens of the chosen responses, in order, on every rank; called by every rank."""
    if not chosen:
        return []
    everything = [range(len(chosen))] * s.layout.dp_size
    found = s.fetch(judged.rollouts, judged.problems, chosen, everything)
    return [found[index] for index in range(len(chosen))]


def scores_of(
    s: Session, samples: Sequence[Sample], *, temperature: float = 1.0, entropy: bool = False
) -> list[tuple[float, ...]]:
    """See `Trainer.score`, in passes of as many tokens as the training step's.

    Errors: `NonFiniteError`, before anything is chosen by scores that cannot be compared.
    """
    budget = s.config.train.max_tokens_per_microbatch * s.layout.cp_size
    with Stopwatch(s.device).phase("score"):
        found = [
            scores
            for part in _within(samples, budget)
            for scores in s.trainer.score(part, temperature=temperature, entropy=entropy)
        ]
    if not all(math.isfinite(score) for scores in found for score in scores):
        raise NonFiniteError("the model's log-probs of its own responses are NaN or infinite")
    return found


def _within(samples: Sequence[Sample], budget: int) -> Iterator[list[Sample]]:
    """In order, in parts of at most so many tokens; a longer one is a part of its own."""
    part: list[Sample] = []
    num_tokens = 0
    for sample in samples:
        length = len(sample.prompt_ids) + len(sample.response_ids)
        if part and num_tokens + length > budget:
            yield part
            part, num_tokens = [], 0
        part.append(sample)
        num_tokens += length
    if part:
        yield part


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
    start = 0 if opening < 0 else _token_at(ends, opening + len(THINK) - 1) + 1
    return slice(start, max(start, _token_at(ends, closing)))


def _token_at(ends: Sequence[int], character: int) -> int:
    """The token that a character of the text is in. ends: where each token's text ends."""
    return next(index for index, end in enumerate(ends) if character < end)
