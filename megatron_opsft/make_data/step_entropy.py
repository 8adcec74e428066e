"""StepEntropy's data: steps of least entropy replaced by `[SKIP]`, with an answer that the model
writes behind what is left.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.errors import UserError
from megatron_opsft.make_data.samples import find_thinking, samples_of, scores_of
from megatron_opsft.methods.catalog.fixed_data import StepEntropy
from megatron_opsft.methods.facts import THINK_END, select
from megatron_opsft.records import Sample
from megatron_opsft.runtime.phase import Stopwatch
from megatron_opsft.session import Session
from megatron_opsft.step.judged_problems import JudgedProblems, judge_problems

SKIP = "[SKIP]"
_ANSWERS = 2  # what the seeds of the answers depend on; those of the thinking have 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Token ids. separators: between steps; skip: in place of one; close: behind the thinking."""

    separators: frozenset[int]
    skip: tuple[int, ...]
    close: tuple[int, ...]


def marks_of(tokenizer: PreTrainedTokenizerBase, separator: str) -> Marks:
    """Errors: `UserError` where no token is the separator."""
    found = {i for i in range(len(tokenizer)) if tokenizer.decode([i]) == separator}
    if not found:
        raise UserError(
            f"method.separator={separator!r} is no token of this model's tokenizer; set it to the "
            "text of one that ends steps"
        )
    return Marks(
        separators=frozenset(found),
        skip=tuple(tokenizer.encode(SKIP, add_special_tokens=False)),
        close=tuple(tokenizer.encode(f"\n{THINK_END}", add_special_tokens=False)),
    )


def steps_of(token_ids: Sequence[int], separators: Collection[int]) -> list[range]:
    """StepEntropy's steps: the stretches between separator tokens (a double line break), without
    empty ones.
    """
    borders = [-1, *(i for i, t in enumerate(token_ids) if t in separators), len(token_ids)]
    steps = [range(a + 1, b) for a, b in zip(borders, borders[1:], strict=False)]
    return [step for step in steps if step]


def skipped_steps(
    steps: Sequence[range],
    entropies: Sequence[float],
    *,
    share: float = 0.8,
    score: Literal["sum", "mean"] = "sum",
) -> set[int]:
    """The int(share * steps) steps of least entropy, the earlier of equal ones; they become
    `[SKIP]`.

    entropies: of every token. sum: the paper's score of a step; mean: the code's, which takes
    -p log p of the sampled token for its entropy.
    """
    sums = [math.fsum(entropies[i] for i in step) for step in steps]
    if score == "mean":
        sums = [total / len(step) for total, step in zip(sums, steps, strict=True)]
    order = sorted(range(len(steps)), key=lambda number: (sums[number], number))
    return set(order[: int(share * len(steps))])


def masked(
    token_ids: Sequence[int], steps: Sequence[range], skipped: Collection[int], marks: Marks
) -> tuple[int, ...]:
    """The steps one behind the other without separators, `[SKIP]` for each that is skipped."""
    found: list[int] = []
    for number, step in enumerate(steps):
        found += marks.skip if number in skipped else (token_ids[i] for i in step)
    return tuple(found)


def own_parts(log_probs: Sequence[float]) -> list[float]:
    """-p log p: what the sampled tokens themselves add to the entropies."""
    return [-math.exp(log_prob) * log_prob for log_prob in log_probs]


def step_entropy_rows(
    s: Session, judged: JudgedProblems, settings: StepEntropy, marks: Marks
) -> list[StoredResponse]:
    """Those whose answer is right, the same on every rank."""
    room = s.settings.max_response_tokens - settings.answer_tokens
    kept = {
        sample.problem_id: (sample.prompt_ids, thought)
        for sample, thought in _masked_thoughts(s, judged, settings, marks)
        if len(thought) <= room
    }
    if not kept:
        return []
    answers = judge_problems(
        s,
        [problem for problem in judged.problems if problem.id in kept],
        Stopwatch(s.device),
        num_samples=1,
        limit=settings.answer_tokens,
        seed_step=_ANSWERS,
        encode=lambda problem: sum(kept[problem.id], ()),
    )
    right = samples_of(s, answers, select(answers.responses, settings.answer_tokens))
    return [
        StoredResponse(
            problem_id=answer.problem_id,
            prompt_ids=kept[answer.problem_id][0],
            response_ids=kept[answer.problem_id][1] + answer.response_ids,
        )
        for answer in right
    ]


def _masked_thoughts(
    s: Session, judged: JudgedProblems, settings: StepEntropy, marks: Marks
) -> Iterator[tuple[Sample, tuple[int, ...]]]:
    """Each response that ends its thinking, and that thinking with fewer steps, closed."""
    decode = s.sampler.encoder.tokenizer.decode
    closed = [
        (sample, thinking)
        for sample in samples_of(s, judged, judged.responses)
        if (thinking := find_thinking([decode([token]) for token in sample.response_ids]))
    ]
    by_entropy = settings.score == "sum"
    scored = scores_of(s, [sample for sample, _ in closed], entropy=by_entropy)
    for (sample, part), values in zip(closed, scored, strict=True):
        ids = sample.response_ids
        scores = values[part] if by_entropy else own_parts(values[part])
        steps = steps_of(ids[part], marks.separators)
        skipped = skipped_steps(steps, scores, share=settings.share, score=settings.score)
        yield sample, ids[: part.start] + masked(ids[part], steps, skipped, marks) + marks.close
