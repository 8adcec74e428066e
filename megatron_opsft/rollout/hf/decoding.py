"""The decode loop of the Hugging Face engine: one batch of responses at a time.

`model.generate` shares one random stream over a batch, so a response would depend on its
neighbours. This loop draws every token from the response's own seed, prefills the prompt of a group
once, and drops finished responses from the batch.

Shapes: P prompts of a batch, N responses in it, S prompt length with padding, L longest response,
T prompt and response together, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from megatron_opsft.errors import NonFiniteError
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.hf.attention import make_room
from megatron_opsft.rollout.requests import ResponseRequest
from megatron_opsft.rollout.sampling import sample_tokens, uniforms
from megatron_opsft.runtime.phase import count_tokens

_CHECK_EVERY = (
    4  # tokens between looks at who has finished: each look waits for the device
)
_COMPACT_AT = (
    0.25  # share of finished rows from which dropping them pays for copying the cache
)


class Ended(NamedTuple):
    """A response: token ids up to the end token; the experts chosen, as `Sample.routing` has it."""

    ids: list[int]
    routing: bytes


class ModelPasses:
    """Forward passes of a causal LM with a `DynamicCache`, and the experts that they chose."""

    def __init__(self, model: PreTrainedModel, *, notes_routing: bool = False) -> None:
        """notes_routing: whether `routing` is wanted; only of a mixture of experts."""
        self.model = model
        self._chosen: list[Tensor] = []
        for name, module in model.named_modules() if notes_routing else ():
            if name.endswith(
                ".mlp.gate"
            ):  # logits, weights, and the experts [tokens, top_k]
                module.register_forward_hook(
                    lambda *call: self._chosen.append(call[2][2])
                )

    def forward(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Logits at the last position, [rows, V]; mask: of the tokens held and those given, by
        which the cache grows.
        """
        logits: Tensor = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits

    def routing(self, rows: int, tokens: int) -> Tensor | None:
        """The experts of the last pass, uint8 [rows, tokens, layers x top_k], if they are noted;
        to be read after every pass.
        """
        if not self._chosen:
            return None
        chosen = torch.cat(self._chosen, dim=-1).to(torch.uint8).view(rows, tokens, -1)
        self._chosen.clear()
        return chosen


def as_bytes(routing: Tensor) -> bytes:
    """As `Sample.routing` has it."""
    return routing.cpu().numpy().tobytes()


@torch.inference_mode()
def decode(
    passes: ModelPasses, requests: Sequence[ResponseRequest], sampling: SamplingSettings
) -> Iterator[dict[int, Ended]]:
    """Responses as they finish, by the index of the request; every few tokens, if only none."""
    model = passes.model
    groups = [
        (ids, len([*same])) for ids, same in groupby(r.prompt_ids for r in requests)
    ]
    prompts_PS, mask_PS = _left_pad([ids for ids, _ in groups], model.device)
    cache = DynamicCache(config=model.config)
    positions_PS = (mask_PS.cumsum(dim=-1) - 1).clamp_min(0)
    logits_PV = passes.forward(prompts_PS, mask_PS, positions_PS, cache)
    routing_PSW = passes.routing(*prompts_PS.shape)
    counts_P = torch.tensor([count for _, count in groups], device=model.device)
    owner_N = torch.repeat_interleave(
        torch.arange(len(groups), device=model.device), counts_P
    )
    cache.batch_select_indices(owner_N)
    make_room(cache)
    routing_NSW = None if routing_PSW is None else routing_PSW[owner_N]
    batch = DecodingBatch(
        passes, mask_PS[owner_N], cache, requests, sampling, routing_NSW
    )
    finished = batch.draw(1, logits_PV[owner_N])
    while not all(batch.ended):
        batch.drop_ended()
        finished |= batch.draw(_CHECK_EVERY - batch.num_drawn % _CHECK_EVERY)
        yield finished
        finished = {}
    yield finished


def _left_pad(
    prompts: Sequence[tuple[int, ...]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids int64 [P, S] and mask bool [P, S], True on tokens; padding is token 0."""
    width = max(len(prompt) for prompt in prompts)
    ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [
        [False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts
    ]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class DecodingBatch:
    """A batch of responses being decoded, one token each in a forward pass.

    The last token of each row has been drawn and is not in the cache yet: the next pass reads it
    and gives the logits of the token after it. A row that has ended is decoded on with the others,
    and what it draws is ignored, until dropping the ended rows pays.

    rows: for each row of the batch, the index of its request; num_drawn: tokens drawn for each row,
    ignored ones included; ended: which rows have ended.
    """

    def __init__(
        self,
        passes: ModelPasses,
        mask_NS: Tensor,
        cache: DynamicCache,
        requests: Sequence[ResponseRequest],
        sampling: SamplingSettings,
        routing_NSW: Tensor | None,
    ) -> None:
        """mask_NS: True on tokens of the prompts, which the cache holds. routing_NSW: the experts
        of the prompts, padding too, if experts are noted.
        """
        self.passes, self.cache, self.requests, self.sampling = (
            passes,
            cache,
            requests,
            sampling,
        )
        self.limit, self.device = sampling.max_response_tokens, mask_NS.device
        num_rows, self.width_S = mask_NS.shape
        self.rows = list(range(num_rows))
        self.num_drawn = 0
        self.ended = [False] * num_rows
        seeds_N = torch.tensor(
            [request.seed for request in requests], device=self.device
        )
        self.uniforms_NL = uniforms(
            seeds_N, self.limit
        )  # of all responses, as the tokens
        self.tokens_NL = torch.full((num_rows, self.limit), -1, device=self.device)
        self.mask_NT = torch.cat(
            [mask_NS, mask_NS.new_ones(num_rows, self.limit)], dim=-1
        )
        self._ends = torch.tensor(
            sampling.end_token_ids, dtype=torch.int64, device=self.device
        )
        self._prompts_N = mask_NS.sum(dim=-1)
        self.rows_N = torch.arange(num_rows, device=self.device)
        self._routing_NTW: Tensor | None = None  # of all responses, as the tokens
        if routing_NSW is not None:
            of_responses = routing_NSW.new_zeros(
                num_rows, self.limit, routing_NSW.shape[-1]
            )
            self._routing_NTW = torch.cat([routing_NSW, of_responses], dim=1)

    def draw(
        self, num_tokens: int, logits_NV: Tensor | None = None
    ) -> dict[int, Ended]:
        """Draw `num_tokens` more for every row, but none beyond the longest response. logits_NV: of
        the first, where they are known already.

        Returns the responses that ended, by the index of the request. Errors: `NonFiniteError`.
        """
        num_tokens = min(num_tokens, self.limit - self.num_drawn)
        sampling, rows_N = self.sampling, self.rows_N
        length_N = torch.tensor(self.ended, device=self.device).long()  # 0: goes on
        finite_N = torch.ones_like(rows_N, dtype=torch.bool)
        for drawn in range(self.num_drawn, self.num_drawn + num_tokens):
            if logits_NV is None:
                logits_NV = self._forward(drawn)
            finite_N &= logits_NV.amax(dim=-1).isfinite()
            token_N = sample_tokens(
                logits_NV,
                self.uniforms_NL[rows_N, drawn],
                sampling.temperature,
                sampling.top_p,
            )
            self.tokens_NL[rows_N, drawn] = token_N
            ended_N = torch.isin(token_N, self._ends) | (drawn + 1 == self.limit)
            length_N = torch.where((length_N == 0) & ended_N, drawn + 1, length_N)
            logits_NV = None
        self.num_drawn += num_tokens
        count_tokens(num_tokens * self.ended.count(False))
        if bad := [
            row
            for row, fine in zip(self.rows, finite_N.tolist(), strict=True)
            if not fine
        ]:
            raise NonFiniteError(
                f"rollout: the model's logits are NaN or infinite in {len(bad)} of "
                f"{len(self.rows)} responses, the first to problem "
                f"{self.requests[bad[0]].problem_id}, before token {self.num_drawn + 1}: the "
                "weights are damaged, or too large for the dtype; take another checkpoint or "
                "another dtype"
            )
        finished = {}
        for n, length in enumerate(length_N.tolist()):
            if length and not self.ended[n]:
                self.ended[n] = True
                ids = self.tokens_NL[self.rows[n], :length].tolist()
                finished[self.rows[n]] = Ended(ids, self._routing(n, length))
        return finished

    def _routing(self, n: int, length: int) -> bytes:
        """Of the prompt and the first tokens of the response in row `n`, but for the last."""
        if self._routing_NTW is None:
            return b""
        first = self.width_S - int(self._prompts_N[n])
        return as_bytes(
            self._routing_NTW[self.rows_N[n], first : self.width_S + length - 1]
        )

    def _forward(self, drawn: int) -> Tensor:
        """Logits [N, V] after the first `drawn` tokens of every row."""
        ids_N1 = self.tokens_NL[self.rows_N, drawn - 1][:, None]
        positions_N1 = (self._prompts_N + drawn - 1)[:, None]
        mask = self.mask_NT[:, : self.width_S + drawn]
        logits_NV = self.passes.forward(ids_N1, mask, positions_N1, self.cache)
        seen = self.passes.routing(len(mask), 1)
        if seen is not None and self._routing_NTW is not None:
            self._routing_NTW[self.rows_N, self.width_S + drawn - 1] = seen[:, 0]
        return logits_NV

    def drop_ended(self) -> None:
        """Drop the rows that have ended, once that is worth copying the cache."""
        num_ended = sum(self.ended)
        if num_ended == 0 or num_ended < _COMPACT_AT * len(self.rows):
            return
        kept = [n for n, ended in enumerate(self.ended) if not ended]
        self.rows = [self.rows[n] for n in kept]
        self.ended = [False] * len(kept)
        if kept:
            kept_N = torch.tensor(kept, device=self.device)
            self.cache.batch_select_indices(kept_N)
            self.mask_NT, self._prompts_N = (
                self.mask_NT[kept_N],
                self._prompts_N[kept_N],
            )
            self.rows_N = self.rows_N[kept_N]
