"""Decoding with drafts: several tokens of a response in one forward pass.

A draft is put behind the last token of its row, and one pass gives the logits at every place of it;
all tokens of all rows are one sequence in it, without padding. Each place draws with the number it
has anyway, so the draft holds up to the first draw that is another token, and that token is right
in its place: responses are those of passes without drafts. Keys and values of the rest of a draft
are written over by the next pass, which begins there; until then the mask hides them, as it hides
everything behind a query's own place.

Shapes: N rows in the batch, S prompt length with padding, Q most tokens of a row in a pass,
M tokens of a pass, T places in the cache, L longest response, V vocabulary.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from megatron_opsft.rollout.draft_counts import DraftCounts
from megatron_opsft.rollout.draft_length import MAX_DRAFT, DraftLength
from megatron_opsft.rollout.follower import Draft, Follower
from megatron_opsft.rollout.hf.attention import GROUPED_SDPA, PackedQueries
from megatron_opsft.rollout.hf.batch import DecodingBatch
from megatron_opsft.rollout.hf.batching import CHECK_EVERY
from megatron_opsft.rollout.hf.kv_cache import GrowingLayer, write_at
from megatron_opsft.rollout.hf.passes import check_finite
from megatron_opsft.rollout.pass_costs import PassShape
from megatron_opsft.rollout.requests import PromptRequest
from megatron_opsft.rollout.suffix_index import SuffixIndex, TextHistory
from megatron_opsft.runtime.phase import count_tokens


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
    """A batch of responses with what each of them follows.

    Passes without drafts are the batch's own; what they gave is read when drafts are next looked
    for.
    """

    def __init__(self, batch: DecodingBatch, memory: Speculation) -> None:
        self._batch, self._memory = batch, memory
        texts = [list(single.prompt_ids) for single in batch.singles]
        indexes = memory.indexes(batch.singles, texts)
        self._indexes = tuple({id(index): index for index in indexes}.values())
        self._followers = [
            Follower(text, index) for text, index in zip(texts, indexes, strict=True)
        ]
        self._numbers_Q = torch.arange(MAX_DRAFT + 1, device=batch.device)
        self._lengths: list[int] = []  # of responses that ended, without the first token
        memory.length.open_batch(self._shape().context)

    def decode(self, logits_NV: Tensor) -> Iterator[dict[int, list[int]]]:
        """See `HfDecoding.decode`; logits_NV: after the prompts."""
        finished = self._batch.begin(logits_NV)
        self._keep(finished)
        yield finished
        while self._batch.going_on:
            self._batch.drop_ended()
            finished = self._next()
            self._keep(finished)
            yield finished
        if self._lengths:
            self._memory.length.close_batch(self._lengths)

    def _next(self) -> dict[int, list[int]]:
        """Tokens of a pass with drafts, or of a few without; responses that ended in them."""
        batch, length, shape = self._batch, self._memory.length, self._shape()
        start = looked = time.perf_counter()
        num_passes = min(length.rest(shape.rows), CHECK_EVERY)
        drafts: dict[int, Draft] = {}
        if num_passes == 0:
            drafts = self._drafts(shape)
            looked = time.perf_counter()
        before = sum(batch.num_drawn)
        if drafts:
            finished = self._check(drafts)
            num_drafted = sum(len(tokens) for _, tokens in drafts.values())
            seconds = time.perf_counter() - start
            num_tokens = sum(batch.num_drawn) - before
            count_tokens(num_tokens)
            length.note(shape, num_drafted, seconds, num_tokens)
            return finished
        num_passes = min(max(num_passes, 1), batch.passes_left)
        finished = batch.run(num_passes)
        seconds = time.perf_counter() - looked
        length.note_plain(shape, seconds, num_passes, looking=looked - start)
        return finished

    def _shape(self) -> PassShape:
        """Of the next pass."""
        batch = self._batch
        context = batch.width_S + max(batch.num_drawn)
        return PassShape(len(batch.rows), batch.ended.count(False), context)

    def _drafts(self, shape: PassShape) -> dict[int, Draft]:
        """Row of the batch -> its draft, which never goes beyond the longest response; none where
        they do not pay.
        """
        batch = self._batch
        going = [n for n, ended in enumerate(batch.ended) if not ended]
        for n in going:
            self._read(self._followers[batch.rows[n]], n)
        for index in self._indexes:
            index.catch_up()
        # One more token is drawn after a draft.
        room = [min(batch.limit - batch.num_drawn[n] - 1, MAX_DRAFT) for n in going]
        drafts = [
            self._followers[batch.rows[n]].draft(most) for n, most in zip(going, room, strict=True)
        ]
        most = self._memory.length.choose(
            shape, [kind for kind, _ in drafts], [len(tokens) for _, tokens in drafts]
        )
        if not any(most):
            return {}
        return {
            n: (kind, tokens[:length])
            for n, (kind, tokens), length in zip(going, drafts, most, strict=True)
        }

    def _read(self, follower: Follower, n: int) -> None:
        """What passes without drafts have drawn for row `n`."""
        batch = self._batch
        row = batch.rows[n]
        known = len(follower.text) - len(batch.singles[row].prompt_ids)
        if known < batch.num_drawn[n]:
            for token in batch.tokens_NL[row, known : batch.num_drawn[n]].tolist():
                follower.put(token)

    def _keep(self, finished: Mapping[int, list[int]]) -> None:
        """Responses that ended, for their siblings and for later ones."""
        for row, ids in finished.items():
            single, text = self._batch.singles[row], self._followers[row].text
            text[:] = (*single.prompt_ids, *ids)
            if len(ids) > 1:
                self._lengths.append(len(ids) - 1)
            if not self._memory.alone:
                self._memory.history.add(single.problem_id, text)

    def _check(self, drafts: Mapping[int, Draft]) -> dict[int, list[int]]:
        """One pass over the last token and the draft of every row that goes on, and what is drawn
        there; responses that ended.
        """
        batch = self._batch
        logits_MV, uniforms_M = self._forward(drafts)
        finite_M = logits_MV.amax(dim=-1).isfinite()
        token_M, sure_M = batch.passes.draw(logits_MV, uniforms_M, batch.sampling)
        drawn = _Drawn(logits_MV, uniforms_M, token_M.tolist(), sure_M.tolist(), finite_M.tolist())
        m, taken = 0, []
        finished: dict[int, list[int]] = {}
        for n, (kind, tokens) in drafts.items():
            row, start = batch.rows[n], batch.num_drawn[n]
            ids = self._take(n, tokens, drawn, m)
            taken += [(row, start + j, token) for j, token in enumerate(ids)]
            if tokens:
                right = sum(a == b for a, b in zip(ids, tokens, strict=False))
                self._memory.length.note_draft(kind, len(tokens), right)
            if batch.ended[n]:
                text, single = self._followers[row].text, batch.singles[row]
                finished[row] = text[len(single.prompt_ids) :]
            m += len(tokens) + 1
        rows_K, places_K, tokens_K = torch.tensor(taken, device=batch.device).T
        batch.tokens_NL[rows_K, places_K] = tokens_K
        return finished

    def _take(self, n: int, tokens: Sequence[int], drawn: _Drawn, m: int) -> list[int]:
        """The draws of row `n`, from place `m` of the pass on, up to the first that is not the
        draft's.
        """
        batch = self._batch
        row, follower = batch.rows[n], self._followers[batch.rows[n]]
        taken: list[int] = []
        for j in range(len(tokens) + 1):
            check_finite([drawn.finite[m + j]], [batch.singles[row].problem_id], batch.num_drawn[n])
            token = drawn.tokens[m + j]
            if not drawn.sure[m + j]:
                token = batch.passes.draw_alone(
                    follower.text, drawn.logits_MV[m + j], drawn.uniforms_M[m + j], batch.sampling
                )
            follower.put(token)
            taken.append(token)
            batch.num_drawn[n] += 1
            batch.ended[n] = token in batch.sampling.end_token_ids or (
                batch.num_drawn[n] == batch.limit
            )
            if batch.ended[n] or j == len(tokens) or token != tokens[j]:
                break
        return taken

    def _forward(self, drafts: Mapping[int, Draft]) -> tuple[Tensor, Tensor]:
        """Logits [M, V] after the last token of every row that goes on and after each of its draft,
        row by row, and the random numbers [M] of the tokens that come there.
        """
        batch = self._batch
        places, first = [], [batch.width_S] * len(batch.rows)
        for n, (_, tokens) in drafts.items():
            follower = self._followers[batch.rows[n]]
            done = batch.num_drawn[n] - 1
            first[n] = batch.width_S + done
            position = len(follower.text) - 1
            places += [
                (token, n, j, first[n] + j, position + j)
                for j, token in enumerate((follower.text[-1], *tokens))
            ]
        ids_M, numbers_M, ahead_M, places_M, positions_M = torch.tensor(
            places, device=batch.device
        ).T
        width = 1 + max(len(tokens) for _, tokens in drafts.values())
        total = 1 + max(place for _, _, _, place, _ in places)
        # Behind a row's own draft there is nothing to ask, only a place to keep the shape.
        first_N1 = torch.tensor(first, device=batch.device)[:, None]
        last_NQ1 = (first_N1 + self._numbers_Q[:width])[..., None]
        mask_NQT = (batch.places_T[:total] <= last_NQ1) & batch.mask_NT[:, None, :total]
        batch.uneven = True
        write_at(batch.cache, numbers_M, places_M, total)
        packed = PackedQueries(numbers_M, ahead_M, len(batch.rows), width)
        logits_MV = batch.passes.forward(
            ids_M[None], mask_NQT[:, None], positions_M[None], batch.cache, kept=0, packed=packed
        )[0]
        # What is read at a place gives the token of the next one.
        return logits_MV, batch.uniforms_NL[batch.rows_N[numbers_M], places_M - batch.width_S + 1]
