"""The decode loop of the Hugging Face engine: one batch of responses at a time.

`model.generate` shares one random stream over a batch, so a response would depend on its
neighbours. This loop draws every token from the response's own seed, prefills the prompt of a group
once, and drops finished responses from the batch.

What is left of the neighbours is rounding: it may move a border of the distribution across the
number that is drawn. Where that is allowed for (`noise`), the loop finds the draws that are so
close to a border, and takes them from logits that are computed for the response alone, on one
thread. So responses are the same in every batch, as long as rounding moves no cumulative
probability by more.

Shapes: P prompts of a batch, N responses still decoding, S prompt length with padding, L longest
response, V vocabulary.
"""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from megatron_opsft.errors import NonFiniteError
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.hf.attention import PackedQueries
from megatron_opsft.rollout.hf.batching import CHECK_EVERY, COMPACT_AT
from megatron_opsft.rollout.hf.kv_cache import make_room
from megatron_opsft.rollout.hf.speculation import Speculation, SpeculativeBatch, can_speculate
from megatron_opsft.rollout.requests import PromptRequest, single_requests
from megatron_opsft.rollout.sampling import (
    largest_move,
    sample_tokens,
    sample_with_margins,
    uniforms,
)
from megatron_opsft.runtime.threads import one_thread

_log = logging.getLogger(__name__)
# The composition of a batch moved cumulative probabilities by at most 4e-6 (0.7 M parameters) and
# 2e-5 (8 layers of hidden size 1,536), both in float32 at temperature 0.6.
ROUNDING = 5e-5


class HfDecoding:
    """Decodes batches with any causal LM of transformers that takes a `DynamicCache`."""

    def __init__(
        self, model: PreTrainedModel, noise: float, speculation: Speculation | None = None
    ) -> None:
        """noise: how far rounding may move a cumulative probability; 0: draws are taken as they
        come. speculation: where drafts come from, if there are any.
        """
        self._model = model
        self.noise = noise
        self.speculation = speculation

    @torch.inference_mode()
    def decode(
        self, batch: Sequence[PromptRequest], sampling: SamplingSettings
    ) -> Iterator[dict[int, list[int]]]:
        """Responses as they finish: place in `single_requests(batch)` -> token ids up to the end
        token. Comes every few tokens, if only empty.
        """
        device = self._model.device
        prompts_PS, mask_PS = _left_pad([request.prompt_ids for request in batch], device)
        cache = DynamicCache(config=self._model.config)
        positions_PS = (mask_PS.cumsum(dim=-1) - 1).clamp_min(0)
        logits_PV = self._forward(prompts_PS, mask_PS, positions_PS, cache)
        counts = torch.tensor([len(request.seeds) for request in batch], device=device)
        owner_N = torch.repeat_interleave(torch.arange(len(batch), device=device), counts)
        cache.batch_select_indices(owner_N)
        make_room(cache)
        singles = single_requests(batch)
        logits_NV, mask_NS = logits_PV[owner_N], mask_PS[owner_N]
        if self.speculation is not None and can_speculate(self._model, cache):
            drafted = SpeculativeBatch(self, self.speculation, mask_NS, cache, singles, sampling)
            yield from drafted.decode(logits_NV)
        else:
            yield from self._decode(logits_NV, mask_NS, cache, singles, sampling)

    def _decode(
        self,
        logits_NV: Tensor,
        mask_NS: Tensor,
        cache: DynamicCache,
        singles: Sequence[PromptRequest],
        sampling: SamplingSettings,
    ) -> Iterator[dict[int, list[int]]]:
        """Rows as they finish, with their token ids up to the end token; empty in between."""
        num_rows, num_tokens = mask_NS.shape[0], sampling.max_response_tokens
        device = mask_NS.device
        ends = torch.tensor(sampling.end_token_ids, dtype=torch.int64, device=device)
        seeds_N = torch.tensor([single.seeds[0] for single in singles], device=device)
        uniforms_NL = uniforms(seeds_N, num_tokens)
        tokens_NL = torch.full((num_rows, num_tokens), -1, dtype=torch.int64, device=device)
        next_position_N = mask_NS.sum(dim=-1)
        mask_NT = torch.cat([mask_NS, mask_NS.new_ones(num_rows, num_tokens)], dim=-1)
        rows_N = torch.arange(num_rows, device=device)  # of tokens_NL, for those decoding
        length_N = torch.zeros_like(rows_N)  # with the end token, once it is there
        finite_N = torch.ones_like(rows_N, dtype=torch.bool)  # all logits since the last check
        yielded: set[int] = set()
        for t in range(num_tokens):
            finite_N &= logits_NV.amax(dim=-1).isfinite()
            token_N, sure_N = sample_with_margins(
                logits_NV, uniforms_NL[rows_N, t], sampling.temperature, sampling.top_p, self.noise
            )
            if self.noise and not bool(sure_N.all()):
                for n in (~sure_N & (length_N == 0)).nonzero().squeeze(-1).tolist():
                    row = int(rows_N[n])
                    ids = [*singles[row].prompt_ids, *tokens_NL[row, :t].tolist()]
                    token_N[n] = self.sample_alone(ids, logits_NV[n], uniforms_NL[row, t], sampling)
            tokens_NL[rows_N, t] = token_N
            length_N = torch.where((length_N == 0) & torch.isin(token_N, ends), t + 1, length_N)
            last = t + 1 == num_tokens
            if last:
                length_N = torch.where(length_N == 0, t + 1, length_N)
            if last or t % CHECK_EVERY == CHECK_EVERY - 1:
                _check_finite(finite_N, [singles[row].problem_id for row in rows_N.tolist()], t)
                lengths = dict(zip(rows_N.tolist(), length_N.tolist(), strict=True))
                new = [row for row, length in lengths.items() if length and row not in yielded]
                yield {row: tokens_NL[row, : lengths[row]].tolist() for row in new}
                yielded.update(new)
                num_finished = sum(length > 0 for length in lengths.values())
                if num_finished == len(lengths):
                    return
                if num_finished >= COMPACT_AT * len(lengths):
                    kept = (length_N == 0).nonzero().squeeze(-1)
                    cache.batch_select_indices(kept)
                    rows_N, token_N, length_N = rows_N[kept], token_N[kept], length_N[kept]
                    mask_NT, next_position_N = mask_NT[kept], next_position_N[kept]
                    finite_N = finite_N[kept]
            logits_NV = self._forward(
                token_N[:, None],
                mask_NT[:, : mask_NS.shape[1] + t + 1],
                (next_position_N + t)[:, None],
                cache,
            )

    def sample_alone(
        self, ids: Sequence[int], logits_V: Tensor, uniform: Tensor, sampling: SamplingSettings
    ) -> Tensor:
        """The next token, [1], from logits that depend on `ids` alone; logits_V: the batch's.

        The two show what rounding does here: what is allowed for it must be well above.
        """
        with one_thread():
            alone_1V = self._model(
                input_ids=torch.tensor([ids], device=self._model.device),
                use_cache=False,
                logits_to_keep=1,
            ).logits[:, -1]
        moved = largest_move(alone_1V[0], logits_V, sampling.temperature)
        if moved > self.noise / 2:
            _log.warning(
                "rounding moves probabilities by %.1e, more than half of the %.1e allowed for: a "
                "response so far may depend on its batch; from here on %.1e is allowed for",
                *(moved, self.noise, 4 * moved),
            )
            self.noise = 4 * moved
        return sample_tokens(alone_1V, uniform[None], sampling.temperature, sampling.top_p)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Logits at the last position, [rows, V]; the cache grows by the given tokens."""
        return self.forward(ids, mask, positions, cache, kept=1)[:, -1]

    def forward(
        self,
        ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        cache: DynamicCache,
        *,
        kept: int = 0,
        **more: PackedQueries,
    ) -> Tensor:
        """Logits at the last `kept` positions or at all, [rows, kept, V]; mask: of tokens, or of
        queries and places as attention takes it; more: for attention.
        """
        logits: Tensor = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=kept,
            **more,
        ).logits
        return logits

    def raise_not_finite(self, problem_ids: Sequence[str], t: int) -> None:
        """Errors: `NonFiniteError`, of these rows before their token `t + 1`."""
        _check_finite(torch.zeros(len(problem_ids), dtype=torch.bool), problem_ids, t - 1)


def _check_finite(finite_N: Tensor, problem_ids: Sequence[str], t: int) -> None:
    """Errors: `NonFiniteError` where a row had logits that no token can be drawn from."""
    if not bool(finite_N.all()):
        bad = [name for name, ok in zip(problem_ids, finite_N.tolist(), strict=True) if not ok]
        raise NonFiniteError(
            f"rollout: the model's logits are NaN or infinite in {len(bad)} of {len(problem_ids)} "
            f"responses, the first to problem {bad[0]}, before token {t + 2}: the weights are "
            "damaged, or too large for the dtype; take another checkpoint or another dtype"
        )


def _left_pad(prompts: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids int64 [P, S] and mask bool [P, S], True on tokens; padding is token 0."""
    width = max(len(prompt) for prompt in prompts)
    ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
