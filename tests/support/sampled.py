"""What the embedded engine samples, and from which logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatron_opsft.rollout.engine import EngineShare
from megatron_opsft.rollout.hf import decoding
from megatron_opsft.rollout.hf.attention import GROUPED_SDPA
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.rollout.requests import ResponseRequest
from megatron_opsft.rollout.sampling import sample_tokens, uniforms


class SpellingTokenizer:
    """Every token is its number and a space."""

    def batch_decode(self, sequences: list[list[int]], **kwargs: bool) -> list[str]:
        assert kwargs["skip_special_tokens"] is False
        return ["".join(f"{token} " for token in ids) for ids in sequences]


def engine_of(model: PreTrainedModel, batch_size: int = 64) -> HfEngine:
    model.set_attn_implementation(GROUPED_SDPA)
    share = EngineShare(index=0, count=1)
    return HfEngine(model, SpellingTokenizer(), batch_size, version=0, share=share)


class NotedLogits:
    """Logits from which an engine drew, by the uniform number of the draw."""

    def __init__(self) -> None:
        self.by_uniform: dict[float, Tensor] = {}

    def draw(self, logits_NV: Tensor, uniforms_N: Tensor, *settings: float) -> Tensor:
        for uniform, logits_V in zip(uniforms_N.tolist(), logits_NV, strict=True):
            self.by_uniform[uniform] = logits_V.clone()
        return sample_tokens(logits_NV, uniforms_N, *settings)

    def log_probs(self, request: ResponseRequest, num_tokens: int) -> Tensor:
        """Of the whole vocabulary at each token of a response, [tokens, V]."""
        numbers = uniforms(torch.tensor([request.seed]), num_tokens)[0].tolist()
        return torch.stack([self.by_uniform[number] for number in numbers]).log_softmax(-1)


@contextmanager
def noted_logits() -> Iterator[NotedLogits]:
    noted = NotedLogits()
    with mock.patch.object(decoding, "sample_tokens", noted.draw):
        yield noted
