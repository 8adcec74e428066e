"""The decode loop of the Hugging Face engine: one batch of responses at a time.

`model.generate` shares one random stream over a batch, so a response would depend on its
neighbours. This loop draws every token from the response's own seed, prefills the prompt of a group
once, and drops finished responses from the batch.

What is left of the neighbours is rounding: it may move a border of the distribution across the
number that is drawn. Where that is allowed for (`noise`), the loop finds the draws that are so
close to a border, and takes them from logits that are computed for the response alone, on one
thread. So responses are the same in every batch, as long as rounding moves no cumulative
probability by more.

Shapes: P prompts of a batch, N responses, S prompt length with padding, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.hf.batch import DecodingBatch
from megatron_opsft.rollout.hf.batching import CHECK_EVERY
from megatron_opsft.rollout.hf.kv_cache import make_room
from megatron_opsft.rollout.hf.passes import ModelPasses
from megatron_opsft.rollout.requests import ResponseRequest

# The composition of a batch moved cumulative probabilities by at most 4e-6 (0.7 M parameters) and
# 2e-5 (8 layers of hidden size 1,536), both in float32 at temperature 0.6.
ROUNDING = 5e-5


class HfDecoding:
    """Decodes batches with any causal LM of transformers that takes a `DynamicCache`."""

    def __init__(self, model: PreTrainedModel, noise: float) -> None:
        """noise: how far rounding may move a cumulative probability; 0: draws are taken as they
        come.
        """
        self.passes = ModelPasses(model, noise)

    @torch.inference_mode()
    def decode(
        self, requests: Sequence[ResponseRequest], sampling: SamplingSettings
    ) -> Iterator[dict[int, list[int]]]:
        """Responses as they finish: index of the request -> token ids up to the end token. Comes
        every few tokens, if only empty.
        """
        model = self.passes.model
        groups = [(ids, len([*same])) for ids, same in groupby(r.prompt_ids for r in requests)]
        prompts_PS, mask_PS = _left_pad([ids for ids, _ in groups], model.device)
        cache = DynamicCache(config=model.config)
        positions_PS = (mask_PS.cumsum(dim=-1) - 1).clamp_min(0)
        logits_PV = self.passes.forward(prompts_PS, mask_PS, positions_PS, cache)
        counts_P = torch.tensor([count for _, count in groups], device=model.device)
        owner_N = torch.repeat_interleave(torch.arange(len(groups), device=model.device), counts_P)
        cache.batch_select_indices(owner_N)
        make_room(cache)
        logits_NV, mask_NS = logits_PV[owner_N], mask_PS[owner_N]
        batch = DecodingBatch(self.passes, mask_NS, cache, requests, sampling)
        finished = batch.begin(logits_NV)
        while batch.going_on:
            batch.drop_ended()
            finished |= batch.run(CHECK_EVERY - batch.num_drawn % CHECK_EVERY)
            yield finished
            finished = {}
        yield finished


def _left_pad(prompts: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids int64 [P, S] and mask bool [P, S], True on tokens; padding is token 0."""
    width = max(len(prompt) for prompt in prompts)
    ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
