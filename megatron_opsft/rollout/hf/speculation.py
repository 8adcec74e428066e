"""Decoding with drafts: several tokens of a response in one forward pass.

A draft is put behind the last token of its row, and one pass gives the logits at every place of it.
Each place draws with the number it has anyway, so the draft holds up to the first draw that is
another token, and that token is right in its place: responses are those of the plain loop. Keys and
values of the rest of a draft are written over by the next pass, which begins there; until then the
mask hides them, as it hides everything behind a query's own place.

Shapes: N responses still decoding, S prompt length with padding, Q tokens of a row in a pass, M
places that are drawn at, T places in the cache, L longest response, V vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from megatron_opsft.rollout.engine import PromptRequest, SamplingSettings
from megatron_opsft.rollout.hf.batching import COMPACT_AT
from megatron_opsft.rollout.hf.draft_length import WIDTHS, DraftLength
from megatron_opsft.rollout.hf.kv_cache import GrowingLayer, write_at
from megatron_opsft.rollout.sampling import sample_with_margins, uniforms
from megatron_opsft.rollout.suffix_index import SuffixIndex, TextHistory

if TYPE_CHECKING:
    from megatron_opsft.rollout.hf.decoding import HfDecoding

Draft = tuple[int, list[int]]  # how many tokens agreed; what may come next
_NONE: Draft = (0, [])


def can_speculate(cache: DynamicCache) -> bool:
    """Whether every layer lets its last places be written again; sliding windows do not."""
    return all(isinstance(layer, GrowingLayer) for layer in cache.layers)


class Speculation:
    """What an engine remembers from batch to batch."""

    def __init__(self) -> None:
        self.length = DraftLength()
        self.history = TextHistory()


@dataclass(slots=True)
class _Row:
    """A response being decoded; text: prompt and response."""

    number: int
    single: PromptRequest
    text: list[int]
    index: SuffixIndex
    ended: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.text) - len(self.single.prompt_ids)


class SpeculativeBatch:
    """One batch of responses."""

    def __init__(
        self,
        decoding: "HfDecoding",
        memory: Speculation,
        mask_NS: Tensor,
        cache: DynamicCache,
        singles: Sequence[PromptRequest],
        sampling: SamplingSettings,
    ) -> None:
        self._decoding, self._memory, self._cache = decoding, memory, cache
        self._sampling, self._limit = sampling, sampling.max_response_tokens
        self._width_S, self._device = mask_NS.shape[1], mask_NS.device
        room_NL = mask_NS.new_ones(len(singles), self._limit)
        self._mask_NT = torch.cat([mask_NS, room_NL], dim=-1)
        seeds_N = torch.tensor([single.seeds[0] for single in singles], device=self._device)
        self._uniforms_NL = uniforms(seeds_N, self._limit)
        texts = [list(single.prompt_ids) for single in singles]
        indexes = {
            name: SuffixIndex(
                memory.history.of(name),
                [t for t, s in zip(texts, singles, strict=True) if s.problem_id == name],
            )
            for name in {single.problem_id for single in singles}
        }
        self._indexes = tuple(indexes.values())
        self._rows = [
            _Row(number, single, text, indexes[single.problem_id])
            for number, (single, text) in enumerate(zip(singles, texts, strict=True))
        ]
        memory.length.open_batch(len(singles))

    def decode(self, logits_NV: Tensor) -> Iterator[dict[int, list[int]]]:
        """See `HfDecoding.decode`; logits_NV: after the prompts."""
        logits_NQV, drafts = logits_NV[:, None], [_NONE] * len(self._rows)
        length = self._memory.length
        while True:
            alive = sum(not row.ended for row in self._rows)
            yield self._draw(logits_NQV, drafts)
            if all(row.ended for row in self._rows):
                return
            self._compact()
            start = time.perf_counter()
            drafts = self._drafts()
            width = 1 + max(len(tokens) for _, tokens in drafts)
            logits_NQV = self._forward(drafts, width)
            before = sum(row.num_tokens for row in self._rows)
            alive = sum(not row.ended for row in self._rows)
            finished = self._draw(logits_NQV, drafts)
            seconds = time.perf_counter() - start
            length.note(alive, width, seconds, sum(r.num_tokens for r in self._rows) - before)
            yield finished
