"""What engines are asked for, the rollouts that they make of it, and the text of their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, Protocol, TypeVar

from megatron_opsft.records import FinishReason, Rollout
from megatron_opsft.rollout.sampling import response_seed

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """One response to a prompt. Neighbours with the same prompt are prefilled together.

    seed: in [0, 2^63); what the response's random numbers depend on.
    """

    problem_id: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    seed: int


def make_requests(
    problem_id: str,
    prompt_ids: Sequence[int],
    num_samples: int,
    run_seed: int,
    step: int,
) -> list[ResponseRequest]:
    """A group of responses, seeded by (run seed, step, problem, sample index)."""
    prompt_ids = tuple(prompt_ids)
    return [
        ResponseRequest(
            problem_id=problem_id,
            sample_index=index,
            prompt_ids=prompt_ids,
            seed=response_seed(run_seed, step, problem_id, index),
        )
        for index in range(num_samples)
    ]


def deal_evenly(groups: Sequence[Sequence[_T]], num_parts: int) -> list[list[_T]]:
    """The members of all groups in `num_parts` parts, whose sizes differ by at most one.

    Groups are dealt in turn, so that each part has early and late ones. Only where two parts meet
    is a group divided.
    """
    in_turn = [
        *chain.from_iterable(
            g for first in range(num_parts) for g in groups[first::num_parts]
        )
    ]
    bounds = [-(-part * len(in_turn) // num_parts) for part in range(num_parts + 1)]
    return [in_turn[start:stop] for start, stop in pairwise(bounds)]


class Decoder(Protocol):
    """The part of a tokenizer that the engines need."""

    def batch_decode(self, sequences: list[list[int]], **kwargs: bool) -> list[str]: ...


def make_rollouts(
    requests: Sequence[ResponseRequest],
    responses: Sequence[Sequence[int]],
    *,
    end_token_ids: Sequence[int],
    tokenizer: Decoder,
    version: int,
    routing: Sequence[bytes] | None = None,
) -> list[Rollout]:
    """responses: of each request the token ids up to the first end token, which is kept; a response
    that does not end so was cut off at the limit. routing: as `Sample` has it.

    The end token is not part of the text.
    """
    if not responses:
        return []
    stopped = [bool(ids) and ids[-1] in end_token_ids for ids in responses]
    texts = tokenizer.batch_decode(
        [
            list(ids[:-1] if stop else ids)
            for ids, stop in zip(responses, stopped, strict=True)
        ],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    return [
        Rollout(
            problem_id=request.problem_id,
            sample_index=request.sample_index,
            prompt_ids=request.prompt_ids,
            response_ids=tuple(ids),
            text=text,
            finish_reason=FinishReason.STOP if stop else FinishReason.LENGTH,
            weight_version=version,
            routing=chosen,
        )
        for request, ids, text, stop, chosen in zip(
            requests,
            responses,
            texts,
            stopped,
            routing or [b""] * len(responses),
            strict=True,
        )
    ]


_TORN = "\N{REPLACEMENT CHARACTER}"


def pieces_of(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds to those before it; joined they are the whole text.

    A character of several tokens is with the last of them, the others add nothing. Decoded in
    context, since some tokenizers drop a space where a text begins.
    """
    decode = partial(
        tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    pieces: list[str] = []
    context = read = 0  # first token of the context, first token that was not read yet
    for stop in range(1, len(token_ids) + 1):
        before, text = decode(token_ids[context:read]), decode(token_ids[context:stop])
        is_whole = not text.endswith(_TORN) or stop == len(token_ids)
        pieces.append(text[len(before) :] if is_whole else "")
        if is_whole:
            context, read = read, stop
    return pieces
