"""StepEntropy's data: steps of least entropy replaced by `[SKIP]`, with an answer that the model
writes behind what is left.
"""

import math
from collections.abc import Collection, Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from megatron_opsft.commands.make_data.samples import (
    find_thinking,
    row_of,
    samples_of,
    scores_of,
)
from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.errors import UserError
from megatron_opsft.methods.catalog.fixed_data import StepEntropy
from megatron_opsft.methods.facts import THINK_END, select
from megatron_opsft.records import Sample
from megatron_opsft.run.start.session import Session
from megatron_opsft.run.step.judged_problems import JudgedProblems, judge_problems
from megatron_opsft.runtime.phase import Stopwatch

SKIP = "[SKIP]"
_ANSWERS = 2  # what the seeds of the answers depend on; those of the thinking have 1


def check_separator(tokenizer: PreTrainedTokenizerBase, separator: str) -> None:
    """Errors: `UserError` where no token is the separator."""
    if len(tokenizer.encode(separator, add_special_tokens=False)) != 1:
        raise UserError(
            f"method.separator={separator!r} is not a token of this model's tokenizer; "
            "set it to the text of one that ends steps"
        )


def steps_of(texts: Sequence[str], separator: str) -> list[range]:
    """StepEntropy's steps: the stretches between separator tokens (a double line break), without
    empty ones. texts: of each token.
    """
    borders = [
        -1,
        *(i for i, text in enumerate(texts) if text == separator),
        len(texts),
    ]
    steps = [range(a + 1, b) for a, b in zip(borders, borders[1:], strict=False)]
    return [step for step in steps if step]


def skipped_steps(
    steps: Sequence[range], entropies: Sequence[float], share: float = 0.8
) -> set[int]:
    """The int(share * steps) steps of least entropy, the earlier of equal ones; they become
    `[SKIP]`. entropies: of every token; a step has their sum.
    """
    sums = [math.fsum(entropies[i] for i in step) for step in steps]
    order = sorted(range(len(steps)), key=lambda number: (sums[number], number))
    return set(order[: int(share * len(steps))])


def masked(
    token_ids: Sequence[int],
    steps: Sequence[range],
    skipped: Collection[int],
    skip: Sequence[int],
) -> tuple[int, ...]:
    """The steps one behind the other without separators, `skip` for each that is skipped."""
    found: list[int] = []
    for number, step in enumerate(steps):
        found += skip if number in skipped else (token_ids[i] for i in step)
    return tuple(found)


def step_entropy_rows(
    s: Session, judged: JudgedProblems, settings: StepEntropy
) -> list[StoredResponse]:
    """Those whose answer is right, the same on every rank."""
    room = s.settings.max_response_tokens - settings.answer_tokens
    kept = {
        sample.problem_id: (sample.prompt_ids, thought)
        for sample, thought in _masked_thoughts(s, judged, settings)
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
        row_of(
            answer, prompt_ids=prompt_ids, response_ids=thought + answer.response_ids
        )
        for answer in right
        for prompt_ids, thought in [kept[answer.problem_id]]
    ]


def _masked_thoughts(
    s: Session, judged: JudgedProblems, settings: StepEntropy
) -> Iterator[tuple[Sample, tuple[int, ...]]]:
    """Each response that ends its thinking, and that thinking with fewer steps, closed."""
    tokenizer = s.sampler.encoder.tokenizer
    skip, close = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in (SKIP, f"\n{THINK_END}")
    )
    closed = []
    for sample in samples_of(s, judged, judged.responses):
        texts = [tokenizer.decode([token]) for token in sample.response_ids]
        if thinking := find_thinking(texts):
            closed.append(
                (sample, thinking, steps_of(texts[thinking], settings.separator))
            )
    scored = scores_of(s, [sample for sample, *_ in closed], entropy=True)
    for (sample, part, steps), entropies in zip(closed, scored, strict=True):
        ids = sample.response_ids
        skipped = skipped_steps(steps, entropies[part], settings.share)
        yield (
            sample,
            (*ids[: part.start], *masked(ids[part], steps, skipped, skip), *close),
        )
