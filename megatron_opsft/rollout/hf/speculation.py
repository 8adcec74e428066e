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
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from megatron_opsft.rollout.draft_counts import DraftCounts
from megatron_opsft.rollout.engine import PromptRequest, SamplingSettings
from megatron_opsft.rollout.hf.batching import COMPACT_AT
from megatron_opsft.rollout.hf.draft_length import WIDTHS, DraftLength
from megatron_opsft.rollout.hf.kv_cache import GrowingLayer, write_at
from megatron_opsft.rollout.sampling import sample_with_margins, uniforms
from megatron_opsft.rollout.suffix_index import SuffixIndex, TextHistory

Draft = tuple[int, list[int]]  # how many tokens agreed; what may come next
_NONE: Draft = (0, [])


class _Decoding(Protocol):
    """What is asked of `HfDecoding`."""

    noise: float

    def forward(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache, *, kept: int
    ) -> Tensor: ...

    def sample_alone(
        self, ids: Sequence[int], logits_V: Tensor, uniform: Tensor, sampling: SamplingSettings
    ) -> Tensor: ...

    def raise_not_finite(self, problem_ids: Sequence[str], t: int) -> None: ...


def can_speculate(cache: DynamicCache) -> bool:
    """Whether every layer lets its last places be written again; sliding windows do not."""
    return all(isinstance(layer, GrowingLayer) for layer in cache.layers)


class Speculation:
    """What an engine remembers from batch to batch.

    alone: drafts come from a response and its prompt alone, not from its siblings nor from earlier
    responses.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.alone = alone
        self.length = DraftLength()
        self.history = TextHistory()

    def take_counts(self) -> DraftCounts:
        """Of everything since it was asked before."""
        counts, self.length.counts = self.length.counts, DraftCounts()
        return counts

    def indexes(
        self, singles: Sequence[PromptRequest], texts: Sequence[list[int]]
    ) -> list[SuffixIndex]:
        """One for each response; siblings share theirs."""
        if self.alone:
            return [SuffixIndex([], [text]) for text in texts]
        of_problem = {
            name: SuffixIndex(
                self.history.of(name),
                [t for t, s in zip(texts, singles, strict=True) if s.problem_id == name],
            )
            for name in {single.problem_id for single in singles}
        }
        return [of_problem[single.problem_id] for single in singles]


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
        decoding: _Decoding,
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
        indexes = memory.indexes(singles, texts)
        self._indexes = tuple({id(index): index for index in indexes}.values())
        self._rows = [
            _Row(number, single, text, index)
            for number, (single, text, index) in enumerate(
                zip(singles, texts, indexes, strict=True)
            )
        ]
        memory.length.open_batch(len(singles))

    def decode(self, logits_NV: Tensor) -> Iterator[dict[int, list[int]]]:
        """See `HfDecoding.decode`; logits_NV: after the prompts."""
        length = self._memory.length
        yield self._draw(logits_NV[:, None], [_NONE] * len(self._rows))
        while not all(row.ended for row in self._rows):
            self._compact()
            start = time.perf_counter()
            drafts = self._drafts()
            longest = 1 + max(len(tokens) for _, tokens in drafts)
            width = next(w for w in WIDTHS if w >= longest)
            before = sum(row.num_tokens for row in self._rows)
            num_live = sum(not row.ended for row in self._rows)
            finished = self._draw(self._forward(drafts, longest), drafts)
            seconds = time.perf_counter() - start
            drawn = sum(row.num_tokens for row in self._rows) - before
            length.note(len(self._rows), num_live, width, seconds, drawn)
            yield finished

    def _drafts(self) -> list[Draft]:
        """A draft for every row, none where they do not pay; never beyond the longest response."""
        nothing = [_NONE] * len(self._rows)
        if not self._memory.length.wants_drafts(len(self._rows)):
            return nothing
        for index in self._indexes:
            index.catch_up()
        drafts = [
            _NONE if row.ended else row.index.draft(row.text, self._room(row)) for row in self._rows
        ]
        most = self._memory.length.width(drafts) - 1
        return [(matched, tokens[:most]) for matched, tokens in drafts]

    def _room(self, row: _Row) -> int:
        """How long a draft may be: one more token is drawn after it."""
        return min(self._limit - row.num_tokens - 1, WIDTHS[-1] - 1)

    def _forward(self, drafts: Sequence[Draft], width: int) -> Tensor:
        """Logits [N, Q, V] after the last token of every row and after each token of its draft."""
        ids = [
            [row.text[-1], *tokens] + [0] * (width - 1 - len(tokens))
            for row, (_, tokens) in zip(self._rows, drafts, strict=True)
        ]
        starts = [(len(row.single.prompt_ids), row.num_tokens - 1) for row in self._rows]
        prompts_N, done_N = torch.tensor(starts, device=self._device).T
        ahead_Q = torch.arange(width, device=self._device)
        # Behind a row's own limit there is nothing to say, only a place to keep the shape.
        done_NQ = (done_N[:, None] + ahead_Q).clamp_max(self._limit - 1)
        places_NQ = self._width_S + done_NQ
        total = self._width_S + min(max(n for _, n in starts) + width, self._limit)
        places_T = torch.arange(total, device=self._device)
        mask_NQT = (places_T <= places_NQ[..., None]) & self._mask_NT[:, None, :total]
        write_at(self._cache, places_NQ, total)
        return self._decoding.forward(
            torch.tensor(ids, device=self._device),
            mask_NQT[:, None],
            prompts_N[:, None] + done_NQ,
            self._cache,
            kept=width,
        )

    def _draw(self, logits_NQV: Tensor, drafts: Sequence[Draft]) -> dict[int, list[int]]:
        """Put what is drawn behind every row; responses that ended, by number."""
        places = [
            (n, j)
            for n, (row, (_, tokens)) in enumerate(zip(self._rows, drafts, strict=True))
            if not row.ended
            for j in range(len(tokens) + 1)
        ]
        where = [(self._rows[n].number, self._rows[n].num_tokens + j) for n, j in places]
        rows_M, ahead_M = torch.tensor(places, device=self._device).T
        numbers_M, done_M = torch.tensor(where, device=self._device).T
        logits_MV = logits_NQV[rows_M, ahead_M]
        uniforms_M = self._uniforms_NL[numbers_M, done_M]
        sampling, decoding = self._sampling, self._decoding
        finite = logits_MV.amax(dim=-1).isfinite().tolist()
        token_M, sure_M = sample_with_margins(
            logits_MV, uniforms_M, sampling.temperature, sampling.top_p, decoding.noise
        )
        drawn, sure = token_M.tolist(), sure_M.tolist()
        finished: dict[int, list[int]] = {}
        m = 0
        for row, (matched, tokens) in zip(self._rows, drafts, strict=True):
            if row.ended:
                continue
            accepted = 0
            for j in range(len(tokens) + 1):
                if not finite[m + j]:
                    decoding.raise_not_finite([row.single.problem_id], row.num_tokens)
                token = drawn[m + j]
                if not sure[m + j]:
                    alone = decoding.sample_alone(
                        row.text, logits_MV[m + j], uniforms_M[m + j], sampling
                    )
                    token = int(alone)
                row.text.append(token)
                row.ended = token in sampling.end_token_ids or row.num_tokens == self._limit
                right = j < len(tokens) and token == tokens[j]
                accepted += right
                if row.ended or not right:
                    break
            if tokens:
                self._memory.length.note_draft(matched, len(tokens), accepted)
            if row.ended:
                finished[row.number] = row.text[len(row.single.prompt_ids) :]
                if not self._memory.alone:
                    self._memory.history.add(row.single.problem_id, row.text)
            m += len(tokens) + 1
        return finished

    def _compact(self) -> None:
        """Drop rows that ended, once they are worth copying the cache."""
        kept = [n for n, row in enumerate(self._rows) if not row.ended]
        if len(self._rows) - len(kept) >= COMPACT_AT * len(self._rows):
            kept_K = torch.tensor(kept, device=self._device)
            self._cache.batch_select_indices(kept_K)
            self._mask_NT = self._mask_NT[kept_K]
            self._rows = [self._rows[n] for n in kept]
