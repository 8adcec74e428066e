"""The decode loop of the Hugging Face engine: one batch of responses at a time.

`model.generate` shares one random stream over a batch, so a response would depend on its
neighbours. This loop draws every token from the response's own seed, prefills the prompt of a group
once, and drops finished responses from the batch.

Shapes: P prompts of a batch, R responses to them, N of these still in the batch, S prompt length
with padding, L longest response, T prompt and response together, V vocabulary, W noted experts of a
token in all layers.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from megatron_opsft.errors import NonFiniteError
from megatron_opsft.records import TokenIds
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.hf.attention import make_room
from megatron_opsft.rollout.requests import ResponseRequest
from megatron_opsft.rollout.sampling import sample_tokens, uniforms
from megatron_opsft.runtime.phase import count_tokens

# Tokens between checks for finished responses: each check waits for the device.
_CHECK_EVERY = 4
# Share of finished rows from which dropping them is worth copying the cache.
_COMPACT_AT = 0.25


class Ended(NamedTuple):
    """A finished response."""

    ids: list[int]
    """Token ids, up to the end token."""
    routing: bytes
    """Experts of its tokens, in the format of `Sample.routing`."""


class DecodingPasses:
    """Forward passes of a causal LM with a `DynamicCache`, and the experts that they chose."""

    def __init__(self, model: PreTrainedModel, *, notes_routing: bool) -> None:
        """notes_routing: True to note the experts of a mixture, for `routing`."""
        self.model = model
        self._chosen: list[Tensor] = []
        if notes_routing:
            for name, module in model.named_modules():
                if name.endswith(".mlp.gate"):
                    module.register_forward_hook(self._note_experts)

    def _note_experts(
        self, module: torch.nn.Module, args: Any, output: Sequence[Tensor]
    ) -> None:
        """Note a router's choice. output: logits, weights, and the experts [tokens, top_k]."""
        self._chosen.append(output[2])

    def forward(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Run the tokens `ids` and add them to the cache; return the logits at the last position,
        [rows, V]. mask: True on tokens, False on padding; of the cache first, then of the new
        ones.
        """
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def routing(self, rows: int, tokens: int) -> Tensor:
        """Return the experts of the last pass, uint8 [rows, tokens, W], and forget them; W is 0 if
        they are not noted. Must be called after every pass.
        """
        # The beginning of the result, and all of it if nothing is noted.
        no_experts = torch.empty(
            rows * tokens, 0, dtype=torch.int64, device=self.model.device
        )
        chosen = torch.cat([no_experts, *self._chosen], dim=-1).to(torch.uint8)
        self._chosen.clear()
        return chosen.unflatten(0, (rows, tokens))


def as_bytes(routing: Tensor) -> bytes:
    """Convert the experts of a sample to the format of `Sample.routing`."""
    return routing.cpu().numpy().tobytes()


@torch.inference_mode()
def decode(
    passes: DecodingPasses,
    requests: Sequence[ResponseRequest],
    sampling: SamplingSettings,
) -> Iterator[dict[int, Ended]]:
    """Yield responses as they finish, by the index of the request; an empty dict if none has
    finished in the last few tokens.
    """
    model = passes.model
    prompts: list[TokenIds] = []
    groups = []  # for each response, the index of its prompt
    for request in requests:
        if not prompts or request.prompt_ids != prompts[-1]:
            prompts.append(request.prompt_ids)
        groups.append(len(prompts) - 1)
    prompts_PS = _left_pad([torch.tensor(prompt) for prompt in prompts], model.device)
    all_true = [torch.ones(len(prompt), dtype=torch.bool) for prompt in prompts]
    mask_PS = _left_pad(all_true, model.device)
    cache = DynamicCache(config=model.config)
    positions_PS = (mask_PS.cumsum(dim=-1) - 1).clamp_min(0)
    logits_PV = passes.forward(prompts_PS, mask_PS, positions_PS, cache)
    routing_PSW = passes.routing(*prompts_PS.shape)
    group_N = torch.tensor(groups, device=model.device)
    cache.reorder_cache(group_N)
    make_room(cache)
    batch = DecodingBatch(
        passes,
        mask_PS[group_N],
        cache,
        requests,
        sampling,
        routing_PSW[group_N],
    )
    finished = batch.draw(1, logits_PV[group_N])
    while not all(batch.ended):
        batch.drop_ended()
        finished |= batch.draw(_CHECK_EVERY - batch.num_drawn % _CHECK_EVERY)
        yield finished
        finished = {}
    yield finished


def _left_pad(rows: list[Tensor], device: torch.device) -> Tensor:
    """Stack P vectors to [P, S], with zeros (False) in front of the shorter ones."""
    return pad_sequence(rows, batch_first=True, padding_side="left").to(device)


class DecodingBatch:
    """A batch of responses that are decoded together, one token each in a forward pass.

    The last token of each row has been drawn, but is not in the cache yet: the next pass reads it
    and gives the logits of the token after it. A row that has ended goes on with the others, and
    its tokens are ignored, until it is worth dropping the ended rows.
    """

    def __init__(
        self,
        passes: DecodingPasses,
        mask_NS: Tensor,
        cache: DynamicCache,
        requests: Sequence[ResponseRequest],
        sampling: SamplingSettings,
        routing_NSW: Tensor,
    ) -> None:
        """mask_NS: True on tokens of the prompts, which are in the cache. routing_NSW: the experts
        of the prompts and their padding; W, the noted experts of a token in all layers, may be 0.
        """
        self.passes = passes
        self.cache = cache
        self.requests = requests
        self.sampling = sampling
        self.limit = sampling.max_response_tokens
        self.device = mask_NS.device
        num_rows, self.width_S = mask_NS.shape
        self.num_drawn = 0
        """Tokens drawn for each row, ignored ones included."""
        self.ended = [False] * num_rows
        """For each row, True if its response has ended."""
        seeds = [request.seed for request in requests]
        seeds_N = torch.tensor(seeds, device=self.device)
        self._end_ids = torch.tensor(
            sampling.end_token_ids, dtype=torch.int64, device=self.device
        )

        # A row for each request (R), to the end.
        self.uniforms_RL = uniforms(seeds_N, self.limit)
        self.tokens_RL = torch.full((num_rows, self.limit), -1, device=self.device)
        self._routing_RTW = pad(routing_NSW, (0, 0, 0, self.limit))

        # A row for each response of the batch (N): `drop_ended` removes rows here and in the cache.
        self.rows_N = torch.arange(num_rows, device=self.device)
        """For each row of the batch, the index of its request."""
        self.mask_NT = pad(mask_NS, (0, self.limit), value=True)
        self._prompt_lengths_N = mask_NS.sum(dim=-1)

    def draw(
        self, num_tokens: int, logits_NV: Tensor | None = None
    ) -> dict[int, Ended]:
        """Draw `num_tokens` more for every row, but none beyond the longest response.

        logits_NV: those of the first token, if they are known already.
        Returns the responses that ended, by the index of the request. Errors: `NonFiniteError`.
        """
        num_tokens = min(num_tokens, self.limit - self.num_drawn)
        rows_N = self.rows_N
        # 0 while the response goes on. Those that ended before have some other number, since their
        # length is known.
        length_N = torch.tensor(self.ended, device=self.device).long()
        finite_N = torch.ones_like(rows_N, dtype=torch.bool)
        for drawn in range(self.num_drawn, self.num_drawn + num_tokens):
            if logits_NV is None:
                logits_NV = self._forward(drawn)
            finite_N &= logits_NV.amax(dim=-1).isfinite()
            token_N = sample_tokens(
                logits_NV,
                self.uniforms_RL[rows_N, drawn],
                self.sampling.temperature,
                self.sampling.top_p,
            )
            self.tokens_RL[rows_N, drawn] = token_N
            ended_N = torch.isin(token_N, self._end_ids) | (drawn + 1 == self.limit)
            length_N = torch.where((length_N == 0) & ended_N, drawn + 1, length_N)
            logits_NV = None
        self.num_drawn += num_tokens
        count_tokens(num_tokens * self.ended.count(False))
        self._check_finite(finite_N)
        finished = {}
        lengths = zip(rows_N.tolist(), length_N.tolist(), strict=True)
        for n, (request_index, length) in enumerate(lengths):
            if length and not self.ended[n]:
                self.ended[n] = True
                ids = self.tokens_RL[request_index, :length].tolist()
                finished[request_index] = Ended(ids, self._routing(n, length))
        return finished

    def _check_finite(self, finite_N: Tensor) -> None:
        """Errors: `NonFiniteError`, unless the logits of every row were finite."""
        non_finite = self.rows_N[~finite_N].tolist()
        if non_finite:
            raise NonFiniteError(
                f"rollout: the model's logits are NaN or infinite in {len(non_finite)} of "
                f"{len(finite_N)} responses, the first to problem "
                f"{self.requests[non_finite[0]].problem_id}, before token {self.num_drawn + 1}: "
                "the weights are damaged, or too large for the dtype; take another checkpoint or "
                "another dtype"
            )

    def _routing(self, n: int, length: int) -> bytes:
        """Return the experts of row `n`: of the prompt and of the first `length` - 1 tokens of the
        response, since no pass has read the last one.
        """
        start = self.width_S - int(self._prompt_lengths_N[n])
        stop = self.width_S + length - 1
        return as_bytes(self._routing_RTW[self.rows_N[n], start:stop])

    def _forward(self, drawn: int) -> Tensor:
        """Return the logits [N, V] after the first `drawn` tokens of every row."""
        ids_N1 = self.tokens_RL[self.rows_N, drawn - 1][:, None]
        positions_N1 = (self._prompt_lengths_N + drawn - 1)[:, None]
        mask = self.mask_NT[:, : self.width_S + drawn]
        logits_NV = self.passes.forward(ids_N1, mask, positions_N1, self.cache)
        position = self.width_S + drawn - 1
        routing_N1W = self.passes.routing(len(mask), 1)
        self._routing_RTW[self.rows_N, position] = routing_N1W[:, 0]
        return logits_NV

    def drop_ended(self) -> None:
        """Drop the rows that have ended, if there are enough to be worth copying the cache. Some
        must go on.
        """
        if sum(self.ended) < _COMPACT_AT * len(self.ended):
            return
        running = [n for n, ended in enumerate(self.ended) if not ended]
        self.ended = [False] * len(running)
        running_N = torch.tensor(running, device=self.device)
        self.cache.reorder_cache(running_N)
        self.mask_NT = self.mask_NT[running_N]
        self._prompt_lengths_N = self._prompt_lengths_N[running_N]
        self.rows_N = self.rows_N[running_N]
