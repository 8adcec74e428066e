"""What ranks send each other about a step's responses: facts of all responses to every rank, tokens
only to the ranks that pack them.
"""

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch

from megatron_opsft.records import (
    FinishReason,
    Outcome,
    Problem,
    Response,
    Rollout,
    Sample,
    Thinking,
    TokenUse,
    Verdict,
)
from megatron_opsft.runtime.distributed import Layout, broadcast_in_replica
from megatron_opsft.runtime.exchange import all_gather_bytes, route_bytes

_OUTCOMES = list(Outcome)
_KINDS_OF_THINKING = list(Thinking)
_NUM_FACTS = 14  # of a response, each an int32
_NONE = -1


def share_facts(
    rollouts: Sequence[Rollout],
    verdicts: Sequence[Verdict],
    token_uses: Sequence[TokenUse],
    problems: Sequence[Problem],
) -> list[Response]:
    """Return the facts of all ranks' responses, ordered by problem (as in `problems`) and sample
    index, so that the number of ranks cannot matter. Collective over the world; 56 bytes a
    response.

    rollouts, verdicts, token_uses: this rank's; problems: the step's, the same on every rank.
    """
    index_of = {problem.id: index for index, problem in enumerate(problems)}
    rows = []
    for index, (rollout, verdict, use) in enumerate(
        zip(rollouts, verdicts, token_uses, strict=True)
    ):
        rows.append(
            (
                index_of[rollout.problem_id],
                rollout.sample_index,
                len(rollout.prompt_ids),
                len(rollout.response_ids),
                _OUTCOMES.index(verdict.outcome),
                rollout.finish_reason is FinishReason.STOP,
                index,
                *_as_numbers(use),
            )
        )
    facts_here = torch.tensor(rows, dtype=torch.int32).flatten().view(torch.uint8)
    responses = []
    for rank, received in enumerate(all_gather_bytes(facts_here)):
        # Cloned, because int32 must begin at a multiple of its size.
        table = received.clone().view(torch.int32).view(-1, _NUM_FACTS)
        for (
            problem_index,
            sample_index,
            num_prompt_tokens,
            num_tokens,
            outcome_index,
            finished,
            rollout_index,
            *use_numbers,
        ) in table.tolist():
            responses.append(
                Response(
                    problem_index=problem_index,
                    sample_index=sample_index,
                    num_prompt_tokens=num_prompt_tokens,
                    num_tokens=num_tokens,
                    outcome=_OUTCOMES[outcome_index],
                    finished=bool(finished),
                    rank=rank,
                    rollout_index=rollout_index,
                    token_use=_from_numbers(use_numbers),
                )
            )
    # Responses of equal keys stay in the order of ranks: sorted() is stable.
    return sorted(responses, key=attrgetter("problem_index", "sample_index"))


def _as_numbers(use: TokenUse) -> list[int]:
    """Return where a response's tokens went as whole numbers; the share in millionths."""
    return [
        _KINDS_OF_THINKING.index(use.thinking),
        use.num_thinking,
        _NONE if use.first_right is None else use.first_right,
        use.num_restated,
        use.num_doubts,
        round(1e6 * use.repeated_share),
        use.num_leaked,
    ]


def _from_numbers(numbers: Sequence[int]) -> TokenUse:
    """Return what `_as_numbers` has written."""
    kind, num_thinking, first_right, num_restated, num_doubts, share, num_leaked = (
        numbers
    )
    return TokenUse(
        thinking=_KINDS_OF_THINKING[kind],
        num_thinking=num_thinking,
        first_right=None if first_right == _NONE else first_right,
        num_restated=num_restated,
        num_doubts=num_doubts,
        repeated_share=share / 1e6,
        num_leaked=num_leaked,
    )


def fetch_samples(
    responses: Sequence[Response],
    indices_of: Sequence[Sequence[int]],
    rollouts: Sequence[Rollout],
    problems: Sequence[Problem],
    layout: Layout,
    device: torch.device,
    *,
    routing_width: int = 0,
) -> dict[int, Sample]:
    """Return the samples that this rank packs, by index in `responses`. Collective over the world.

    Tokens travel as int32, behind them the routing: from the rank that holds a response to the
    first rank of the replica that packs it, and from there to the other ranks of the replica.

    responses: those to be trained on; indices_of: the responses that each data-parallel rank packs;
    both the same on every rank. rollouts: this rank's. device: for the replica's collectives.
    routing_width: layers x top_k if `Rollout.routing` travels too, else 0.
    """
    # In the order in which they arrive: by the rank that sends them, then by index.
    wanted = sorted(
        indices_of[layout.dp_rank], key=lambda index: (responses[index].rank, index)
    )
    sizes = [_num_bytes(responses[index], routing_width) for index in wanted]
    outgoing: dict[int, bytearray] = defaultdict(bytearray)  # receiving rank -> bytes
    for dp_rank, indices in enumerate(indices_of):
        receiver = layout.first_of_replica(dp_rank)
        for index in sorted(indices):
            response = responses[index]
            if response.rank == layout.rank:
                rollout = rollouts[response.rollout_index]
                outgoing[receiver] += _token_bytes(rollout)
                if routing_width:
                    outgoing[receiver] += rollout.routing
    incoming = route_bytes(
        {
            rank: torch.frombuffer(content, dtype=torch.uint8)
            for rank, content in outgoing.items()
        }
    )
    arrived = torch.empty(sum(sizes), dtype=torch.uint8)
    if incoming:  # only on the first rank of a replica that packs something
        arrived = torch.cat(list(incoming.values()))
    parts = broadcast_in_replica(arrived.to(device)).cpu().split(sizes)
    samples = {}
    for index, part in zip(wanted, parts, strict=True):
        response = responses[index]
        token_bytes, routing_bytes = part.tensor_split([4 * response.sequence_tokens])
        # Cloned, because int32 must begin at a multiple of its size.
        ids = tuple(token_bytes.clone().view(torch.int32).tolist())
        samples[index] = Sample(
            problem_id=problems[response.problem_index].id,
            sample_index=response.sample_index,
            prompt_ids=ids[: response.num_prompt_tokens],
            response_ids=ids[response.num_prompt_tokens :],
            routing=routing_bytes.numpy().tobytes(),
        )
    return samples


def _token_bytes(rollout: Rollout) -> bytes:
    """Return the tokens of prompt and response as int32."""
    ids = rollout.prompt_ids + rollout.response_ids
    return np.array(ids, dtype=np.int32).tobytes()


def _num_bytes(response: Response, routing_width: int) -> int:
    """Return the bytes of a response on its way: tokens, and the routing of all but the last."""
    num_tokens = response.sequence_tokens
    return 4 * num_tokens + routing_width * (num_tokens - 1)
