"""StepEntropy's data: steps of least entropy replaced by `[SKIP]`, with an answer that the model
writes behind what is left.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.errors import UserError
from megatron_opsft.make_data.draw import Draw, draw_responses, scores_of
from megatron_opsft.make_data.thinking import find_thinking
from megatron_opsft.methods.batch import THINK_END, select
from megatron_opsft.methods.catalog.fixed_data import StepEntropy
from megatron_opsft.records import Sample

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


def step_entropy_rows(draw: Draw, settings: StepEntropy, marks: Marks) -> list[StoredResponse]:
    """Those whose answer is right, the same on every rank."""
    s, limit = draw.session, draw.session.settings.max_response_tokens
    thoughts = _masked_thoughts(draw, settings, marks)
    kept = {
        name: (sample, thought)
        for name, (sample, thought) in thoughts.items()
        if len(thought) + settings.answer_tokens <= limit
    }
    if not kept:
        return []
    answers = draw_responses(
        s,
        [problem for problem in draw.judged.problems if problem.id in kept],
        1,
        settings.answer_tokens,
        seed_step=_ANSWERS,
        encode=lambda problem: kept[problem.id][0].prompt_ids + kept[problem.id][1],
    )
    right = answers.samples(select(answers.judged.responses, settings.answer_tokens))
    return [
        StoredResponse(
            problem_id=answer.problem_id,
            prompt_ids=kept[answer.problem_id][0].prompt_ids,
            response_ids=kept[answer.problem_id][1] + answer.response_ids,
        )
        for answer in right
    ]


def _masked_thoughts(
    draw: Draw, settings: StepEntropy, marks: Marks
) -> dict[str, tuple[Sample, tuple[int, ...]]]:
    """By problem id: the response, and its thinking with fewer steps, closed; of those that end
    their thinking.
    """
    s = draw.session
    decode = s.sampler.encoder.tokenizer.decode
    closed = []
    for sample in draw.samples(draw.judged.responses):
        thinking = find_thinking([decode([token]) for token in sample.response_ids])
        if thinking is not None:
            closed.append((sample, thinking))
    by_entropy = settings.score == "sum"
    scored = scores_of(s, [sample for sample, _ in closed], entropy=by_entropy)
    found = {}
    for (sample, part), values in zip(closed, scored, strict=True):
        ids = sample.response_ids
        scores = values[part] if by_entropy else own_parts(values[part])
        steps = steps_of(ids[part], marks.separators)
        skipped = skipped_steps(steps, scores, share=settings.share, score=settings.score)
        inside = masked(ids[part], steps, skipped, marks)
        found[sample.problem_id] = (sample, ids[: part.start] + inside + marks.close)
    return found
