"""TokenSkip's data: correct responses without the words of their reasoning that say least, and the
share that is kept told in the prompt.

Words are scored by the model's own self-information, -log p of their tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from statistics import fmean

from megatron_opsft.data.boxed import find_boxes
from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.make_data.draw import Draw, scores_of
from megatron_opsft.make_data.thinking import find_thinking
from megatron_opsft.methods.batch import select
from megatron_opsft.methods.catalog.fixed_data import TokenSkipSettings
from megatron_opsft.methods.data_choice import kept_words, ratio_of


def words_of(texts: Sequence[str]) -> list[range]:
    """Tokens of each word. texts: of each token; a word begins where white space ends."""
    starts = [
        number
        for number, text in enumerate(texts)
        if number == 0 or text[:1].isspace() or texts[number - 1][-1:].isspace()
    ]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(texts)], strict=True)]


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


def shortened(
    token_ids: Sequence[int],
    texts: Sequence[str],
    scores: Sequence[float],
    settings: TokenSkipSettings,
    ratio: float,
    tokenize: Callable[[str], Sequence[int]],
) -> tuple[int, ...]:
    """A finished response with less reasoning: what it thinks, or without thinking all of it, and
    the answer from its last box behind that; () where there is neither.
    """
    if (thinking := find_thinking(texts)) is not None:
        part = slice(thinking.span.start, thinking.span.stop)
        rest = tuple(token_ids[part.stop :])
    elif boxes := find_boxes("".join(texts)):
        part = slice(0, len(token_ids) - 1)
        answer = f"\n\nThe final answer is: \\boxed{{{boxes[-1].content}}}"
        rest = (*tokenize(answer), token_ids[-1])
    else:
        return ()
    inside = pruned(token_ids[part], texts[part], scores[part], ratio, settings.window_tokens)
    return tuple(token_ids[: part.start]) + inside + rest


def tokenskip_rows(draw: Draw, settings: TokenSkipSettings) -> list[StoredResponse]:
    """The same on every rank; without those whose prompt has no room for the ratio."""
    s, encoder = draw.session, draw.session.sampler.encoder
    samples = draw.samples(select(draw.judged.responses, s.settings.max_response_tokens))
    problems = {problem.id: problem for problem in draw.judged.problems}
    rows = []
    for sample, log_probs in zip(samples, scores_of(s, samples), strict=True):
        ratio = settings.ratio or ratio_of(sample.problem_id, s.config.run.seed)
        told = f"{settings.delimiter}{ratio}{settings.delimiter}" if ratio < 1 else ""
        prompt = encoder.encode(problems[sample.problem_id], suffix=told)
        response = shortened(
            sample.response_ids,
            [encoder.tokenizer.decode([token]) for token in sample.response_ids],
            [-log_prob for log_prob in log_probs],
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
