"""Decoding with drafts: several tokens of a response in one forward pass.

A draft is put behind the last token of its row, and one pass gives the logits at every place of it;
all tokens of all rows are one sequence in it, without padding. Each place draws with the number it
has anyway, so the draft holds up to the first draw that is another token, and that token is right
in its place: responses are those of the plain loop. Keys and values of the rest of a draft are
written over by the next pass, which begins there; until then the mask hides them, as it hides
everything behind a query's own place.

Shapes: N responses still decoding, S prompt length with padding, Q most tokens of a row in a pass,
M tokens of a pass, T places in the cache, L longest response, V vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from megatron_opsft.rollout.draft_counts import DraftCounts
from megatron_opsft.rollout.draft_length import MAX_DRAFT, DraftLength
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.follower import NO_DRAFT, Draft, Follower
from megatron_opsft.rollout.hf.attention import GROUPED_SDPA, PackedQueries
from megatron_opsft.rollout.hf.batching import COMPACT_AT
from megatron_opsft.rollout.hf.kv_cache import GrowingLayer, write_at
from megatron_opsft.rollout.requests import PromptRequest
from megatron_opsft.rollout.sampling import sample_with_margins, uniforms
from megatron_opsft.rollout.suffix_index import SuffixIndex, TextHistory


class _Decoding(Protocol):
    """What is asked of `HfDecoding`."""

    noise: float

    def forward(
        self,
        ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        cache: DynamicCache,
        *,
        kept: int = 0,
        **more: PackedQueries,
    ) -> Tensor: ...

    def sample_alone(
        self, ids: Sequence[int], logits_V: Tensor, uniform: Tensor, sampling: SamplingSettings
    ) -> Tensor: ...

    def raise_not_finite(self, problem_ids: Sequence[str], t: int) -> None: ...


def can_speculate(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Whether attention takes drafts, and every layer lets its last places be written again;
    sliding windows do not.
    """
    grouped = model.config._attn_implementation == GROUPED_SDPA
    return grouped and all(isinstance(layer, GrowingLayer) for layer in cache.layers)


class Speculation:
    """What an engine remembers from batch to batch.

    alone: drafts come from a response and its prompt alone, not from its siblings nor from earlier
    responses.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.alone = alone
        self.length = DraftLength()
        self.history = TextHistory()

    @classmethod
    def of(cls, kind: str) -> "Speculation | None":
        """What `rollout.speculation` asks for."""
        return None if kind == "off" else cls(alone=kind == "ngram")

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


@dataclass(slots=True, eq=False)
class _Row(Follower):
    """A response being decoded."""

    number: int = field(kw_only=True)
    single: PromptRequest = field(kw_only=True)
    ended: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.text) - len(self.single.prompt_ids)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What a pass gave at its M places: logits and random numbers, tokens, and whether each is sure
    and its logits finite.
    """

    logits_MV: Tensor
    uniforms_M: Tensor
    tokens: list[int]
    sure: list[bool]
    finite: list[bool]


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
        self._ends = frozenset(sampling.end_token_ids)
        self._width_S, self._device = mask_NS.shape[1], mask_NS.device
        room_NL = mask_NS.new_ones(len(singles), self._limit)
        self._mask_NT = torch.cat([mask_NS, room_NL], dim=-1)
        seeds_N = torch.tensor([single.seeds[0] for single in singles], device=self._device)
        self._uniforms_NL = uniforms(seeds_N, self._limit)
        texts = [list(single.prompt_ids) for single in singles]
        indexes = memory.indexes(singles, texts)
        self._indexes = tuple({id(index): index for index in indexes}.values())
        self._rows = [
            _Row(text, index, number=number, single=single)
            for number, (single, text, index) in enumerate(
                zip(singles, texts, indexes, strict=True)
            )
        ]
        self._numbers_N = torch.arange(len(singles), device=self._device)
        self._numbers_Q = torch.arange(MAX_DRAFT + 1, device=self._device)
        self._places_T = torch.arange(self._mask_NT.shape[1], device=self._device)
        self._lengths: list[int] = []  # of responses that ended, without the first token
        memory.length.open_batch(len(singles))

    def decode(self, logits_NV: Tensor) -> Iterator[dict[int, list[int]]]:
        """See `HfDecoding.decode`; logits_NV: after the prompts."""
        length = self._memory.length
        finished = self._draw(logits_NV, [NO_DRAFT] * len(self._rows))
        yield finished
        while not all(row.ended for row in self._rows):
            self._compact()
            start = time.perf_counter()
            live = [row for row in self._rows if not row.ended]
            drafts = self._drafts(live)
            num_drafted = sum(len(tokens) for _, tokens in drafts)
            before = sum(row.num_tokens for row in live)
            logits_MV = self._forward_drafts(drafts) if num_drafted else self._forward_one()
            finished = self._draw(logits_MV, drafts)
            seconds = time.perf_counter() - start
            drawn = sum(row.num_tokens for row in live) - before
            length.note(len(self._rows), len(live), num_drafted, seconds, drawn)
            self._lengths += [len(ids) - 1 for ids in finished.values()]
            yield finished
        if self._lengths:
            length.close_batch(self._lengths)

    def _drafts(self, live: Sequence[_Row]) -> list[Draft]:
        """A draft for every row that goes on, none where they do not pay; never beyond the longest
        response.
        """
        length = self._memory.length
        if not length.wants_drafts(len(self._rows)):
            return [NO_DRAFT] * len(live)
        for index in self._indexes:
            index.catch_up()
        # One more token is drawn after a draft.
        drafts = [row.draft(min(self._limit - row.num_tokens - 1, MAX_DRAFT)) for row in live]
        most = length.choose([kind for kind, _ in drafts], [len(tokens) for _, tokens in drafts])
        return [(kind, tokens[:n]) for (kind, tokens), n in zip(drafts, most, strict=True)]

    def _forward_one(self) -> Tensor:
        """Logits [M, V] after the last token of every row that goes on, as in the plain loop."""
        starts = [
            (row.text[-1], len(row.single.prompt_ids), row.num_tokens - 1) for row in self._rows
        ]
        ids_N, prompts_N, done_N = torch.tensor(starts, device=self._device).T
        places_N = self._width_S + done_N
        total = self._width_S + max(done for _, _, done in starts) + 1
        mask_NT = (self._places_T[:total] <= places_N[:, None]) & self._mask_NT[:, :total]
        write_at(self._cache, self._numbers_N[: len(starts)], places_N, total)
        logits_NV = self._decoding.forward(
            ids_N[:, None],
            mask_NT[:, None, None],
            (prompts_N + done_N)[:, None],
            self._cache,
            kept=1,
        )[:, -1]
        live = [n for n, row in enumerate(self._rows) if not row.ended]
        return logits_NV if len(live) == len(starts) else logits_NV[live]

    def _forward_drafts(self, drafts: Sequence[Draft]) -> Tensor:
        """Logits [M, V] after the last token of every row that goes on and after each of its draft,
        row by row.
        """
        places, starts = [], [0] * len(self._rows)
        live = [n for n, row in enumerate(self._rows) if not row.ended]
        for n, (_, tokens) in zip(live, drafts, strict=True):
            row = self._rows[n]
            starts[n] = row.num_tokens - 1
            prompt = len(row.single.prompt_ids)
            places += [
                (token, n, j, starts[n] + j, prompt)
                for j, token in enumerate((row.text[-1], *tokens))
            ]
        ids_M, rows_M, ahead_M, done_M, prompts_M = torch.tensor(places, device=self._device).T
        width = 1 + max(len(tokens) for _, tokens in drafts)
        total = self._width_S + max(done for _, _, _, done, _ in places) + 1
        # Behind a row's own draft there is nothing to ask, only a place to keep the shape.
        first_N = self._width_S + torch.tensor(starts, device=self._device)
        last_NQ = first_N[:, None] + self._numbers_Q[:width]
        mask_NQT = (self._places_T[:total] <= last_NQ[..., None]) & self._mask_NT[:, None, :total]
        write_at(self._cache, rows_M, self._width_S + done_M, total)
        packed = PackedQueries(rows_M, ahead_M, len(self._rows), width)
        return self._decoding.forward(
            ids_M[None], mask_NQT[:, None], (prompts_M + done_M)[None], self._cache, packed=packed
        )[0]

    def _draw(self, logits_MV: Tensor, drafts: Sequence[Draft]) -> dict[int, list[int]]:
        """Put what is drawn behind every row that goes on; responses that ended, by number."""
        live = [row for row in self._rows if not row.ended]
        where = [
            (row.number, row.num_tokens + j)
            for row, (_, tokens) in zip(live, drafts, strict=True)
            for j in range(len(tokens) + 1)
        ]
        numbers_M, done_M = torch.tensor(where, device=self._device).T
        uniforms_M = self._uniforms_NL[numbers_M, done_M]
        sampling, noise = self._sampling, self._decoding.noise
        finite_M = logits_MV.amax(dim=-1).isfinite()
        token_M, sure_M = sample_with_margins(
            logits_MV, uniforms_M, sampling.temperature, sampling.top_p, noise
        )
        drawn = _Drawn(logits_MV, uniforms_M, token_M.tolist(), sure_M.tolist(), finite_M.tolist())
        finished: dict[int, list[int]] = {}
        m = 0
        for row, (kind, tokens) in zip(live, drafts, strict=True):
            accepted = self._take(row, tokens, drawn, m)
            if tokens:
                self._memory.length.note_draft(kind, len(tokens), accepted)
            if row.ended:
                finished[row.number] = row.text[len(row.single.prompt_ids) :]
                if not self._memory.alone:
                    self._memory.history.add(row.single.problem_id, row.text)
            m += len(tokens) + 1
        return finished

    def _take(self, row: _Row, tokens: Sequence[int], drawn: _Drawn, m: int) -> int:
        """The draws of a row, from place `m` on, up to the first that is not the draft's; how many
        are.
        """
        accepted = 0
        for j in range(len(tokens) + 1):
            if not drawn.finite[m + j]:
                self._decoding.raise_not_finite([row.single.problem_id], row.num_tokens)
            token = drawn.tokens[m + j]
            if not drawn.sure[m + j]:
                alone = self._decoding.sample_alone(
                    row.text, drawn.logits_MV[m + j], drawn.uniforms_M[m + j], self._sampling
                )
                token = int(alone)
            row.put(token)
            row.ended = token in self._ends or row.num_tokens == self._limit
            right = j < len(tokens) and token == tokens[j]
            accepted += right
            if row.ended or not right:
                break
        return accepted

    def _compact(self) -> None:
        """Drop rows that ended, once they are worth copying the cache."""
        kept = [n for n, row in enumerate(self._rows) if not row.ended]
        if len(self._rows) - len(kept) >= COMPACT_AT * len(self._rows):
            kept_K = torch.tensor(kept, device=self._device)
            self._cache.batch_select_indices(kept_K)
            self._mask_NT = self._mask_NT[kept_K]
            self._rows = [self._rows[n] for n in kept]
