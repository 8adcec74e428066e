"""TokenSkip's data: correct responses without the words of their reasoning that say least, and the
share that is kept told in the prompt.

Words are scored by LLMLingua-2, or by the model's own self-information, -log p of their tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from operator import itemgetter
from statistics import fmean

from megatron_opsft.data.boxed import find_boxes
from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.make_data.draw import Draw, scores_of
from megatron_opsft.make_data.thinking import find_thinking
from megatron_opsft.make_data.word_scores import WordScorer
from megatron_opsft.make_data.words import words_of
from megatron_opsft.methods.batch import select
from megatron_opsft.methods.catalog.fixed_data import TokenSkipSettings
from megatron_opsft.methods.data_choice import kept_words, ratio_of
from megatron_opsft.records import Sample
from megatron_opsft.runtime.distributed import gather_from_all
from megatron_opsft.session import Session


def windows_of(words: Sequence[range], num_tokens: int | None) -> Iterator[list[range]]:
    """The words in order, in windows of at most so many tokens; a longer word has its own."""
    window: list[range] = []
    for word in words:
        if window and num_tokens is not None and word.stop - window[0].start > num_tokens:
            yield window
            window = []
        window.append(word)
    if window:
        yield window


def pruned(
    token_ids: Sequence[int],
    texts: Sequence[str],
    scores: Sequence[float],
    ratio: float,
    window_tokens: int | None = None,
) -> tuple[int, ...]:
    """The tokens of the words that are kept. scores: of each token; a word has their mean."""
    kept: list[int] = []
    for window in windows_of(words_of(texts), window_tokens):
        means = [fmean(scores[i] for i in word) for word in window]
        keeps = kept_words(means, [len(word) for word in window], ratio)
        kept += (token_ids[i] for word in compress(window, keeps) for i in word)
    return tuple(kept)


def reasoning_of(texts: Sequence[str]) -> slice | None:
    """Which tokens of a finished response may be pruned: what it thinks, or without thinking all of
    it, if it has a box; None where there is neither.
    """
    if (thinking := find_thinking(texts)) is not None:
        return slice(thinking.span.start, thinking.span.stop)
    return slice(0, len(texts) - 1) if find_boxes("".join(texts)) else None


def shortened(
    token_ids: Sequence[int],
    texts: Sequence[str],
    scores: Sequence[float],
    settings: TokenSkipSettings,
    ratio: float,
    tokenize: Callable[[str], Sequence[int]],
) -> tuple[int, ...]:
    """A finished response with less reasoning, and behind it what follows its thinking, or the
    answer from its last box; () where there is no reasoning. scores: of each token.
    """
    part = reasoning_of(texts)
    if part is None:
        return ()
    rest = tuple(token_ids[part.stop :])
    if find_thinking(texts) is None:
        answer = find_boxes("".join(texts))[-1].content
        rest = (*tokenize(f"\n\nThe final answer is: \\boxed{{{answer}}}"), *rest)
    inside = pruned(token_ids[part], texts[part], scores[part], ratio, settings.window_tokens)
    return tuple(token_ids[: part.start]) + inside + rest


def token_scores(
    s: Session, samples: Sequence[Sample], texts: Sequence[Sequence[str]], scorer: WordScorer | None
) -> list[list[float]]:
    """Of each token of each sample, the same on every rank: the scorer's, shared out over the ranks
    and 0 outside of the reasoning, or without one the model's self-information.
    """
    if scorer is None:
        return [[-log_prob for log_prob in found] for found in scores_of(s, samples)]
    mine = []
    for number in range(s.layout.rank, len(samples), s.layout.world_size):
        found = [0.0] * len(texts[number])
        if part := reasoning_of(texts[number]):
            found[part] = scorer(texts[number][part])
        mine.append((number, found))
    return [found for _, found in sorted(gather_from_all(mine), key=itemgetter(0))]


def tokenskip_rows(
    draw: Draw, settings: TokenSkipSettings, scorer: WordScorer | None
) -> list[StoredResponse]:
    """The same on every rank; without those whose prompt has no room for the ratio."""
    s, encoder = draw.session, draw.session.sampler.encoder
    samples = draw.samples(select(draw.judged.responses, s.settings.max_response_tokens))
    texts = [
        [encoder.tokenizer.decode([token]) for token in sample.response_ids] for sample in samples
    ]
    scored = token_scores(s, samples, texts, scorer)
    problems = {problem.id: problem for problem in draw.judged.problems}
    rows = []
    for sample, of_tokens, scores in zip(samples, texts, scored, strict=True):
        ratio = settings.ratio or ratio_of(sample.problem_id, s.config.run.seed)
        told = f"{settings.delimiter}{ratio}{settings.delimiter}" if ratio < 1 else ""
        prompt = encoder.encode(problems[sample.problem_id], suffix=told)
        response = shortened(
            sample.response_ids,
            of_tokens,
            scores,
            settings,
            ratio,
            lambda text: encoder.tokenizer.encode(text, add_special_tokens=False),
        )
        if response and len(prompt) <= s.config.data.max_prompt_tokens:
            rows.append(
                StoredResponse(
                    problem_id=sample.problem_id, prompt_ids=prompt, response_ids=response
                )
            )
    return rows
