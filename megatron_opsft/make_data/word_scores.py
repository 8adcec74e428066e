"""LLMLingua-2's scores of words: a token classifier's probability that a word is kept.

After `llmlingua.prompt_compressor`: the mean over a word's sub-tokens; a longer text comes in
windows that end behind a full stop or a line break where they can.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from megatron_opsft.errors import UserError
from megatron_opsft.make_data.words import words_of
from megatron_opsft.storage.model_paths import local_model, resolve_model

OWN = "self"  # instead of a scorer's name
MAX_WINDOW = 510  # sub-tokens, between the two that mark the ends
_KEPT = 1  # the label
_OPTION = "method.scorer"
log = logging.getLogger("megatron_opsft")


@dataclass(frozen=True, slots=True, kw_only=True)
class WordScorer:
    """A model and its fast tokenizer, which says where in a text its tokens are."""

    model: Any
    tokenizer: Any
    max_window: int = MAX_WINDOW

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """Of each token its word's score. texts: of each token of a reasoning; 0 for a word that
        the tokenizer does not see.
        """
        text = "".join(texts)
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = [tuple(span) for span in found["offset_mapping"]]
        kept = [
            probability
            for window in windows_of_text(text, spans, self.max_window)
            for probability in self._kept([found["input_ids"][i] for i in window])
        ]
        ends = list(accumulate(map(len, texts)))
        scores: list[float] = []
        for word in words_of(texts):
            start, stop = ends[word.start] - len(texts[word.start]), ends[word.stop - 1]
            inside = [p for (a, b), p in zip(spans, kept, strict=True) if a < stop and b > start]
            scores += [fmean(inside) if inside else 0.0] * len(word)
        return scores

    @torch.no_grad()
    def _kept(self, token_ids: Sequence[int]) -> list[float]:
        ends = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        ids = torch.tensor([[ends[0], *token_ids, ends[1]]], device=self.model.device)
        logits = self.model(input_ids=ids).logits[0, 1:-1].float()
        found: list[float] = logits.softmax(-1)[:, _KEPT].tolist()
        return found


def windows_of_text(
    text: str, spans: Sequence[tuple[int, int]], max_tokens: int
) -> Iterator[range]:
    """Tokens in windows of at most so many. spans: characters of each token."""
    first = 0
    while first < len(spans):
        last = min(first + max_tokens, len(spans))
        if last < len(spans):
            ends = [i for i in range(first, last) if _is_end(text, spans, i)]
            last = ends[-1] + 1 if ends else last
        yield range(first, last)
        first = last


def _is_end(text: str, spans: Sequence[tuple[int, int]], number: int) -> bool:
    """Whether a token is a full stop, or a line break comes with it or behind it."""
    start, stop = spans[number]
    return text[start:stop].strip() == "." or "\n" in text[start : spans[number + 1][0]]


def load_scorer(name: str, device: torch.device) -> WordScorer | None:
    """None for `self`, and with a warning where a hub's model cannot be fetched. Errors:
    `UserError` for a name that is neither a directory nor the hub's.
    """
    if name == OWN:
        return None
    local_model(name, option=_OPTION)
    try:
        path: Path = resolve_model(name, option=_OPTION)
    except UserError as error:
        log.warning("%s; words are scored by the model's own self-information instead", error)
        return None
    try:
        model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{_OPTION}={name} is no token classifier: {error}") from None
    if not tokenizer.is_fast or None in (tokenizer.cls_token_id, tokenizer.sep_token_id):
        raise UserError(f"{_OPTION}={name}: its tokenizer is no fast one of an encoder")
    return WordScorer(model=model.to(device).eval(), tokenizer=tokenizer)
