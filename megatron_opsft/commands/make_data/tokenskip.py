"""TokenSkip's data: correct responses without the words of their reasoning that say least, and the
share that is kept stated in the prompt. As in the authors' code, the llmlingua package shortens the
reasoning (LLMLingua-2).
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from megatron_opsft.commands.make_data.samples import find_thinking, row_of, samples_of
from megatron_opsft.data.answers import find_boxes
from megatron_opsft.data.stored_responses import StoredResponse
from megatron_opsft.errors import UserError, first_line
from megatron_opsft.methods.catalog.fixed_data import TokenSkip
from megatron_opsft.methods.facts import select
from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.run.start.session import Session
from megatron_opsft.run.step.judged_problems import JudgedProblems
from megatron_opsft.runtime.distributed import gather_from_all

# Of the share of tokens to keep, one is drawn for each problem.
RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
Shorten = Callable[[str, float], str]  # a text to about a share of its tokens


def open_llmlingua(scorer: str, device: torch.device) -> Shorten:
    """LLMLingua-2 with the token classifier `scorer`. Errors: `UserError` for a model that is not
    there or that llmlingua does not load.
    """
    from llmlingua import PromptCompressor  # an extra: the command has looked for it

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


def tokenskip_rows(
    s: Session, judged: JudgedProblems, settings: TokenSkip, shorten: Shorten
) -> list[StoredResponse]:
    """The same on every rank, which share out the work; without those whose prompt has no room for
    the ratio. What is left of a text is tokenised.
    """
    encoder = s.sampler.encoder
    tokenize = partial(encoder.tokenizer.encode, add_special_tokens=False)
    problems = {problem.id: problem for problem in judged.problems}
    right = samples_of(
        s, judged, select(judged.responses, s.settings.max_response_tokens)
    )
    mine = []
    for index in range(s.layout.rank, len(right), s.layout.world_size):
        sample = right[index]
        texts = [encoder.tokenizer.decode([token]) for token in sample.response_ids]
        draw = random.Random(f"tokenskip:{s.config.run.seed}:{sample.problem_id}")
        ratio = settings.ratio or draw.choice(RATIOS)
        told = f"{settings.delimiter}{ratio}{settings.delimiter}" if ratio < 1 else ""
        prompt = encoder.encode(problems[sample.problem_id], suffix=told)
        parts = split(sample.response_ids, texts, tokenize)
        if parts is None or len(prompt) > s.config.data.max_prompt_tokens:
            continue
        part, behind = parts
        kept = sample.response_ids[part]
        if ratio < 1:
            kept = tuple(tokenize(shorten("".join(texts[part]), ratio)))
        ids = (*sample.response_ids[: part.start], *kept, *behind)
        mine.append((index, row_of(sample, prompt_ids=prompt, response_ids=ids)))
    return [row for _, row in sorted(gather_from_all(mine), key=itemgetter(0))]
