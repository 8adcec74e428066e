"""Sampled token ids into `Rollout`s: the same for every engine."""

from collections.abc import Sequence
from typing import Protocol

from megatron_opsft.records import FinishReason, Rollout
from megatron_opsft.rollout.requests import PromptRequest


class Decoder(Protocol):
    """The part of a tokenizer that the engines need."""

    def batch_decode(self, sequences: list[list[int]], **kwargs: bool) -> list[str]: ...


def make_rollouts(
    requests: Sequence[PromptRequest],
    responses: Sequence[Sequence[int]],
    *,
    end_token_ids: Sequence[int],
    tokenizer: Decoder,
    version: int,
) -> list[Rollout]:
    """responses: token ids in the order of the requests and their samples, up to the first end
    token, which is kept; one that does not end so was cut off at the limit.

    The end token is not part of the text.
    """
    if not responses:
        return []
    stopped = [bool(ids) and ids[-1] in end_token_ids for ids in responses]
    texts = tokenizer.batch_decode(
        [list(ids[:-1] if stop else ids) for ids, stop in zip(responses, stopped, strict=True)],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    places = [(request, index) for request in requests for index in request.sample_indices]
    return [
        Rollout(
            problem_id=request.problem_id,
            sample_index=index,
            prompt_ids=request.prompt_ids,
            response_ids=tuple(ids),
            text=text,
            finish_reason=FinishReason.STOP if stop else FinishReason.LENGTH,
            weight_version=version,
        )
        for (request, index), ids, text, stop in zip(places, responses, texts, stopped, strict=True)
    ]
