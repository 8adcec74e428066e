"""TokenSkip's data: correct responses without the words of their reasoning that say least, and the
share that is kept told in the prompt.

As in the authors' code, the llmlingua package shortens the reasoning (LLMLingua-2); or words are
chosen by the model's own self-information, the mean of -log p of their tokens.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, pairwise
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_opsft.data.answers import find_boxes
from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.errors import NonFiniteError, UserError, first_line
from megatron_opsft.make_data.samples import find_thinking, samples_of, scores_of
from megatron_opsft.methods.batch import select
from megatron_opsft.methods.catalog.fixed_data import SELF, TokenSkip
from megatron_opsft.records import Sample
from megatron_opsft.runtime.distributed import gather_from_all
from megatron_opsft.session import Session
from megatron_opsft.step.judged_problems import JudgedProblems
from megatron_opsft.storage.model_paths import resolve_model

RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
Shorten = Callable[[str, float], str]  # a text to about a share of its tokens


def open_llmlingua(scorer: str, device: torch.device) -> Shorten | None:
    """LLMLingua-2 with the token classifier `scorer`; None for `SELF`. Errors: `UserError` for a
    model that is not there or that llmlingua does not load.
    """
    if scorer == SELF:
        return None
    from llmlingua import PromptCompressor  # an extra: `check_data` has looked for it

    try:
        compressor: Any = PromptCompressor(
            str(resolve_model(scorer, option="method.scorer")),
            device_map=str(device),
            model_config={"trust_remote_code": False},
            use_llmlingua2=True,
        )
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise UserError(
            f"method.scorer={scorer}: llmlingua cannot load it ({first_line(error)})"
        ) from None
    return lambda text, ratio: str(
        compressor.compress_prompt(text, rate=ratio)["compressed_prompt"]
    )


def words_of(texts: Sequence[str]) -> list[range]:
    """Tokens of each word. texts: of each token; a word begins where white space ends."""
    starts = [
        index
        for index, text in enumerate(texts)
        if index == 0 or text[:1].isspace() or texts[index - 1][-1:].isspace()
    ]
    return [range(a, b) for a, b in pairwise([*starts, len(texts)])]


def ratio_of(problem_id: str, seed: int) -> float:
    """TokenSkip's share of tokens to keep, drawn once for each problem."""
    return random.Random(f"tokenskip:{seed}:{problem_id}").choice(RATIOS)


def kept_words(scores: Sequence[float], num_tokens: Sequence[int], ratio: float) -> list[bool]:
    """TokenSkip's choice: words strictly above the percentile int(100 (1 - ratio) + 1) of the
    scores, in which a word counts once for each of its tokens. A ratio of 1 keeps all.
    """
    if ratio >= 1 or not scores:
        return [True] * len(scores)
    threshold = np.percentile(np.repeat(scores, num_tokens), int(100 * (1 - ratio) + 1))
    if not np.isfinite(threshold):
        raise NonFiniteError("scores of a response's words are NaN or infinite")
    return [bool(score > threshold) for score in scores]


def pruned(
    token_ids: Sequence[int], texts: Sequence[str], scores: Sequence[float], ratio: float
) -> tuple[int, ...]:
    """The tokens of the words that are kept. scores: of each token; a word has their mean."""
    words = words_of(texts)
    means = [fmean(scores[i] for i in word) for word in words]
    keeps = kept_words(means, [len(word) for word in words], ratio)
    return tuple(token_ids[i] for word in compress(words, keeps) for i in word)


def split(
    token_ids: Sequence[int], texts: Sequence[str], tokenize: Callable[[str], Sequence[int]]
) -> tuple[slice, tuple[int, ...]] | None:
    """Which tokens of a finished response may be pruned, and those that follow then: what it
    thinks, and the rest; without thinking all of it, and the answer from its last box. None where
    there is neither.
    """
    if (thinking := find_thinking(texts)) is not None:
        return thinking, tuple(token_ids[thinking.stop :])
    if not (boxes := find_boxes("".join(texts))):
        return None
    answer = tokenize(f"\n\nThe final answer is: \\boxed{{{boxes[-1].content}}}")
    return slice(0, len(texts) - 1), (*answer, token_ids[-1])


class _Reasoning(NamedTuple):
    """A correct response. texts: of each token; part: the tokens to shorten to the share `ratio`;
    behind: those that follow it then; prompt: ids with the ratio told.
    """

    sample: Sample
    texts: list[str]
    part: slice
    behind: tuple[int, ...]
    ratio: float
    prompt: tuple[int, ...]


def tokenskip_rows(
    s: Session, judged: JudgedProblems, settings: TokenSkip, shorten: Shorten | None
) -> list[StoredResponse]:
    """The same on every rank; without those whose prompt has no room for the ratio."""
    encoder = s.sampler.encoder
    tokenize = partial(encoder.tokenizer.encode, add_special_tokens=False)
    problems = {problem.id: problem for problem in judged.problems}
    right = select(judged.responses, s.settings.max_response_tokens)
    found = []
    for sample in samples_of(s, judged, right):
        texts = [encoder.tokenizer.decode([token]) for token in sample.response_ids]
        ratio = settings.ratio or ratio_of(sample.problem_id, s.config.run.seed)
        told = f"{settings.delimiter}{ratio}{settings.delimiter}" if ratio < 1 else ""
        prompt = encoder.encode(problems[sample.problem_id], suffix=told)
        parts = split(sample.response_ids, texts, tokenize)
        if parts is not None and len(prompt) <= s.config.data.max_prompt_tokens:
            found.append(_Reasoning(sample, texts, *parts, ratio, prompt))
    if shorten is None:
        kept = _by_self_information(s, found)
    else:
        kept = _by_llmlingua(s, found, shorten, tokenize)
    return [
        StoredResponse(
            problem_id=each.sample.problem_id,
            prompt_ids=each.prompt,
            response_ids=(*each.sample.response_ids[: each.part.start], *ids, *each.behind),
        )
        for each, ids in zip(found, kept, strict=True)
    ]


def _by_self_information(s: Session, found: Sequence[_Reasoning]) -> list[tuple[int, ...]]:
    """Their shortened reasoning, the same on every rank. Token ids stay those that were sampled."""
    scored = scores_of(s, [each.sample for each in found])
    return [
        pruned(
            each.sample.response_ids[each.part],
            each.texts[each.part],
            [-log_prob for log_prob in log_probs[each.part]],
            each.ratio,
        )
        for each, log_probs in zip(found, scored, strict=True)
    ]


def _by_llmlingua(
    s: Session,
    found: Sequence[_Reasoning],
    shorten: Shorten,
    tokenize: Callable[[str], Sequence[int]],
) -> list[tuple[int, ...]]:
    """The same by llmlingua, shared out over the ranks. What it leaves of a text is tokenised."""
    mine = []
    for index in range(s.layout.rank, len(found), s.layout.world_size):
        each = found[index]
        ids = each.sample.response_ids[each.part]
        if each.ratio < 1:
            ids = tuple(tokenize(shorten("".join(each.texts[each.part]), each.ratio)))
        mine.append((index, ids))
    return [ids for _, ids in sorted(gather_from_all(mine), key=itemgetter(0))]
