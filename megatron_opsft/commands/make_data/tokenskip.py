"""TokenSkip's data: correct responses without the least important words of their reasoning. The
prompt states the share of tokens that is kept. As in the authors' code, the llmlingua package
(LLMLingua-2) shortens the reasoning.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from megatron_opsft.commands.make_data.samples import (
    collect_rows,
    find_thinking,
    token_texts,
)
from megatron_opsft.data.answers import find_boxes
from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.errors import UserError, first_line
from megatron_opsft.methods.catalog.fixed_data import TokenSkip
from megatron_opsft.methods.facts import select
from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.records import TokenIds
from megatron_opsft.run.start.session import Session
from megatron_opsft.run.step.judged_problems import JudgedProblems
from megatron_opsft.runtime.distributed import gather_from_all

RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # one is drawn for each problem
Shorten = Callable[[str, float], str]  # shortens a text to about a share of its tokens


def open_llmlingua(scorer: str, device: torch.device) -> Shorten:
    """Load LLMLingua-2 with the token classifier `scorer`.

    Errors: `UserError` for a model that does not exist, or that llmlingua cannot load.
    """
    # Optional; the command checks that it is installed.
    from llmlingua import PromptCompressor

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


def split(
    token_ids: Sequence[int],
    texts: Sequence[str],
    tokenize: Callable[[str], Sequence[int]],
) -> tuple[slice, TokenIds] | None:
    """Split a finished response into its reasoning, which may be shortened, and the tokens that
    follow the reasoning.

    The reasoning is the thinking. Without thinking it is the whole response but its last token, and
    is followed by the answer from the last box and the last token. None if there is neither a
    thinking nor a box. texts: the text of each token.
    """
    if (thinking := find_thinking(texts)) is not None:
        return thinking, tuple(token_ids[thinking.stop :])
    boxes = find_boxes("".join(texts))
    if not boxes:
        return None
    answer = tokenize(f"\n\nThe final answer is: \\boxed{{{boxes[-1].content}}}")
    return slice(0, len(texts) - 1), (*answer, token_ids[-1])


def tokenskip_rows(
    s: Session, judged: JudgedProblems, settings: TokenSkip, shorten: Shorten
) -> list[StoredResponse]:
    """Return the correct responses with shortened reasoning, the same on every rank. Those whose
    prompt becomes too long are left out. Called by every rank; each shortens a share of them.
    """
    encoder = s.sampler.encoder
    tokenizer = encoder.tokenizer
    tokenize = partial(tokenizer.encode, add_special_tokens=False)
    problems = {problem.id: problem for problem in judged.problems}
    right = select(judged.responses, s.settings.max_response_tokens)
    whole = collect_rows(s, judged, right)
    rows: list[tuple[int, StoredResponse]] = []  # with their order
    for index in range(s.layout.rank, len(whole), s.layout.world_size):
        row = whole[index]
        texts = token_texts(tokenizer, row)
        generator = random.Random(f"tokenskip:{s.config.run.seed}:{row.problem_id}")
        ratio = settings.ratio or generator.choice(RATIOS)
        suffix = ""
        if ratio < 1:
            suffix = f"{settings.delimiter}{ratio}{settings.delimiter}"
        prompt_ids = encoder.encode(problems[row.problem_id], suffix=suffix)
        reasoning_and_end = split(row.response_ids, texts, tokenize)
        is_too_long = len(prompt_ids) > s.config.data.max_prompt_tokens
        if is_too_long or reasoning_and_end is None:
            continue
        reasoning, end = reasoning_and_end
        start = row.response_ids[: reasoning.start]
        shortened = row.response_ids[reasoning]
        if ratio < 1:
            shortened = tuple(tokenize(shorten("".join(texts[reasoning]), ratio)))
        response_ids = (*start, *shortened, *end)
        row = replace(
            row, prompt_ids=prompt_ids, response_ids=response_ids, routing=b""
        )
        rows.append((index, row))
    by_index = sorted(gather_from_all(rows), key=itemgetter(0))
    return [row for _, row in by_index]
