"""StepEntropy's data: `[SKIP]` replaces the steps of least entropy; then the model writes a new
answer after the shortened thinking.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from heapq import nsmallest

from transformers import PreTrainedTokenizerBase

from megatron_opsft.commands.make_data.samples import (
    collect_rows,
    find_thinking,
    scores_of,
    token_texts,
)
from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.errors import UserError
from megatron_opsft.methods.catalog.fixed_data import StepEntropy
from megatron_opsft.methods.facts import select
from megatron_opsft.records import THINK_END, TokenIds
from megatron_opsft.run.start.session import Session
from megatron_opsft.run.step.judged_problems import JudgedProblems, judge_problems
from megatron_opsft.runtime.phase import Stopwatch

SKIP = "[SKIP]"
_ANSWER_SEED_STEP = 2  # seeds the answers; the thinking has 1


def check_separator(tokenizer: PreTrainedTokenizerBase, separator: str) -> None:
    """Check that the separator is a single token. Errors: `UserError` if not."""
    if len(tokenizer.encode(separator, add_special_tokens=False)) != 1:
        raise UserError(
            f"method.separator={separator!r} is not a token of this model's tokenizer; "
            "set it to the text of one that ends steps"
        )


def steps_of(texts: Sequence[str], separator: str) -> list[range]:
    """Return the indices of the tokens of each step: the tokens between two separators. Empty steps
    are left out.

    texts: the text of each token.
    """
    steps = []
    start = 0
    for index, text in enumerate([*texts, separator]):
        if text == separator:
            if start < index:
                steps.append(range(start, index))
            start = index + 1
    return steps


def skipped_steps(
    steps: Sequence[range], entropies: Sequence[float], share: float = 0.8
) -> set[int]:
    """Return the numbers of the int(share * steps) steps of least entropy; the earlier
    of two equal ones.

    entropies: one for each token; a step's entropy is their sum.
    """
    sums = [math.fsum(entropies[step.start : step.stop]) for step in steps]
    num_skipped = int(share * len(steps))
    return set(nsmallest(num_skipped, range(len(steps)), key=sums.__getitem__))


def masked(
    token_ids: Sequence[int],
    steps: Sequence[range],
    skipped: Collection[int],
    skip: Sequence[int],
) -> TokenIds:
    """Concatenate the steps without separators, each skipped step replaced by the tokens `skip`."""
    shortened: list[int] = []
    for number, step in enumerate(steps):
        shortened += skip if number in skipped else token_ids[step.start : step.stop]
    return tuple(shortened)


def step_entropy_rows(
    s: Session, judged: JudgedProblems, settings: StepEntropy
) -> list[StoredResponse]:
    """Return the responses with shortened thinking whose new answer is right, the same on every
    rank. Called by every rank.
    """
    max_thinking = s.settings.max_response_tokens - settings.answer_tokens
    unanswered = {}  # problem -> its last response with shortened thinking, up to its end
    for row in _shorten_thinking(s, judged, settings):
        if len(row.response_ids) <= max_thinking:
            unanswered[row.problem_id] = row
    if not unanswered:
        return []
    answers = judge_problems(
        s,
        [problem for problem in judged.problems if problem.id in unanswered],
        Stopwatch(s.device),
        num_samples=1,
        limit=settings.answer_tokens,
        seed_step=_ANSWER_SEED_STEP,
        encode=lambda problem: (
            unanswered[problem.id].prompt_ids + unanswered[problem.id].response_ids
        ),
    )
    right = select(answers.responses, settings.answer_tokens)
    rows = []
    for answer in collect_rows(s, answers, right):
        row = unanswered[answer.problem_id]
        response_ids = row.response_ids + answer.response_ids
        rows.append(replace(row, response_ids=response_ids))
    return rows


def _shorten_thinking(
    s: Session, judged: JudgedProblems, settings: StepEntropy
) -> list[StoredResponse]:
    """Return the responses whose thinking ends, up to the end of their shortened thinking."""
    tokenizer = s.sampler.encoder.tokenizer
    skip = tokenizer.encode(SKIP, add_special_tokens=False)
    close = tokenizer.encode(f"\n{THINK_END}", add_special_tokens=False)
    whole = []
    thoughts = []
    for row in collect_rows(s, judged, judged.responses):
        texts = token_texts(tokenizer, row)
        if thinking := find_thinking(texts):
            whole.append(row)
            thoughts.append((thinking, steps_of(texts[thinking], settings.separator)))
    scores = scores_of(s, whole, entropy=True)
    rows = []
    for row, (thinking, steps), entropies in zip(whole, thoughts, scores, strict=True):
        token_ids = row.response_ids
        skipped = skipped_steps(steps, entropies[thinking], settings.share)
        shortened = masked(token_ids[thinking], steps, skipped, skip)
        response_ids = (*token_ids[: thinking.start], *shortened, *close)
        rows.append(replace(row, response_ids=response_ids))
    return rows
