"""Requests to engines, the rollouts that answer them, and the text of single tokens."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from megatron_opsft.records import FinishReason, Rollout, TokenIds, record
from megatron_opsft.rollout.sampling import response_seed
from megatron_opsft.runtime.rounding import ceil_div

_T = TypeVar("_T")


@record
class ResponseRequest:
    """A request for one response. Neighbours with the same prompt are prefilled together."""

    problem_id: str
    sample_index: int
    prompt_ids: TokenIds
    seed: int
    """Seed of the response's random numbers, in [0, 2^63)."""


def make_requests(
    problem_id: str,
    prompt_ids: Sequence[int],
    num_samples: int,
    run_seed: int,
    step: int,
) -> list[ResponseRequest]:
    """Make the requests of a group, seeded by (run seed, step, problem, sample index)."""
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


def deal_evenly(groups: Sequence[Sequence[_T]], num_shares: int) -> list[list[_T]]:
    """Deal the members of all groups into `num_shares` lists, whose sizes differ by at most one.

    The groups are dealt in turn, so that each share has early and late ones. A group is only
    divided if it lies on the border of two shares.
    """
    members: list[_T] = []
    for first in range(num_shares):
        for group in groups[first::num_shares]:
            members += group
    borders = [
        ceil_div(index * len(members), num_shares) for index in range(num_shares + 1)
    ]
    return [members[start:stop] for start, stop in pairwise(borders)]


class Decoder(Protocol):
    """The method of a tokenizer that the engines need."""

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
    """Make the rollouts of finished requests.

    responses: for each request, the token ids up to the first end token, which is included. A
    response that does not end with one was cut off at the limit.
    routing: for each request, in the format of `Sample.routing`.
    The text does not contain the end token.
    """
    if not responses:
        return []
    bodies, reasons = [], []
    for ids in responses:
        has_end = bool(ids) and ids[-1] in end_token_ids
        bodies.append(list(ids[:-1] if has_end else ids))
        reasons.append(FinishReason.STOP if has_end else FinishReason.LENGTH)
    texts = tokenizer.batch_decode(
        bodies, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    routing = routing or [b""] * len(responses)
    return [
        Rollout(
            problem_id=request.problem_id,
            sample_index=request.sample_index,
            prompt_ids=request.prompt_ids,
            response_ids=tuple(ids),
            text=text,
            finish_reason=reason,
            weight_version=version,
            routing=experts,
        )
        for request, ids, text, reason, experts in zip(
            requests, responses, texts, reasons, routing, strict=True
        )
    ]


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def split_text_by_token(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds to those before it; joined they are the whole text.

    The last token of a character that has several gets it, the others get "". Tokens are decoded
    in context, since some tokenizers drop a space at the beginning of a text.
    """
    decode = partial(
        tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    pieces = []
    # The tokens of the last piece are the context of the next one, whose tokens follow them.
    context_start = piece_start = 0
    for stop in range(1, len(token_ids) + 1):
        context = decode(token_ids[context_start:piece_start])
        text = decode(token_ids[context_start:stop])
        if text.endswith(_INCOMPLETE) and stop < len(token_ids):
            pieces.append("")
        else:
            pieces.append(text[len(context) :])
            context_start, piece_start = piece_start, stop
    return pieces
