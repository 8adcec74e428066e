"""What ranks tell each other of a step's responses: facts to all, tokens only to where they are
packed.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from megatron_opsft.methods.facts import has_unclosed_think
from megatron_opsft.records import (
    FinishReason,
    Outcome,
    Problem,
    Response,
    Rollout,
    Sample,
    Verdict,
)
from megatron_opsft.runtime.distributed import Layout, broadcast_in_replica
from megatron_opsft.runtime.exchange import all_gather_bytes, route_bytes

_OUTCOMES = list(Outcome)
_NUM_FACTS = (
    8  # int32 of a response: the fields of `Response` but for rank and advantage
)


def share_facts(
    rollouts: Sequence[Rollout],
    verdicts: Sequence[Verdict],
    problems: Sequence[Problem],
    *,
    prompts_open_think: bool = False,
) -> list[Response]:
    """Facts of all ranks' responses, in the order of the step's problems and sample indices, so
    that the number of ranks cannot matter. Collective over the world; 32 bytes a response.

    rollouts, verdicts: this rank's; problems: the step's, the same on every rank.
    """
    index_of = {problem.id: index for index, problem in enumerate(problems)}
    rows = [
        (
            index_of[rollout.problem_id],
            rollout.sample_index,
            len(rollout.prompt_ids),
            len(rollout.response_ids),
            _OUTCOMES.index(verdict.outcome),
            rollout.finish_reason is FinishReason.STOP,
            has_unclosed_think(rollout, prompts_open_think=prompts_open_think),
            index,
        )
        for index, (rollout, verdict) in enumerate(zip(rollouts, verdicts, strict=True))
    ]
    mine = torch.tensor(rows, dtype=torch.int32).flatten().view(torch.uint8)
    parts = all_gather_bytes(mine)
    facts = torch.cat(parts).view(torch.int32).view(-1, _NUM_FACTS).numpy()
    ranks = np.repeat(
        np.arange(len(parts)), [len(part) // (4 * _NUM_FACTS) for part in parts]
    )
    order = np.lexsort((facts[:, 1], facts[:, 0]))  # by problem, then sample
    problem, sample, prompt, length, outcome, finished, unclosed, index = facts[order].T
    columns = (
        *(column.tolist() for column in (problem, sample, prompt, length)),
        map(_OUTCOMES.__getitem__, outcome.tolist()),
        *(column.astype(bool).tolist() for column in (finished, unclosed)),
        *(column.tolist() for column in (ranks[order], index)),
    )
    return list(map(Response, *columns))


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
    """The samples that this rank packs, by their index in `responses`. Tokens travel as int32, from
    the rank that holds a response to the first rank of the replica that packs it, and from there to
    the replica's others. Collective over the world.

    responses, indices_of: those to be trained on, and for each data-parallel rank the indices of
    those that it packs; the same on every rank. rollouts: this rank's. device: where a collective
    of the replica takes its tensors. routing_width: layers x top_k where `Rollout.routing` travels
    too, else 0.
    """
    mine = sorted(indices_of[layout.dp_rank], key=lambda i: (responses[i].rank, i))
    tokens_of = [responses[i].sequence_tokens for i in mine]

    def bring(
        content: Callable[[Sequence[Rollout]], Tensor], sizes: list[int]
    ) -> list[Tensor]:
        """Of each of `mine`, as many bytes as `sizes` say, of what its holder has."""
        parts = {}
        for dp_rank, indices in enumerate(indices_of):
            here = [i for i in sorted(indices) if responses[i].rank == layout.rank]
            if here:
                held = [rollouts[responses[i].rollout_index] for i in here]
                parts[layout.first_of_replica(dp_rank)] = content(held)
        came = route_bytes(parts)
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        if came:  # the first rank of a replica that packs something
            flat = torch.cat(list(came.values()))
        return [*broadcast_in_replica(flat.to(device)).cpu().split(sizes)]

    tokens = bring(_token_bytes, [4 * size for size in tokens_of])
    routing: list[Tensor | None] = [None] * len(mine)
    if routing_width:
        routing = [
            *bring(_routing_bytes, [routing_width * (size - 1) for size in tokens_of])
        ]
    samples = {}
    for i, token_bytes, chosen in zip(mine, tokens, routing, strict=True):
        response = responses[i]
        ids = (
            token_bytes.clone().view(torch.int32).tolist()
        )  # a copy: where int32 may begin
        samples[i] = Sample(
            problem_id=problems[response.problem_index].id,
            sample_index=response.sample_index,
            prompt_ids=tuple(ids[: response.num_prompt_tokens]),
            response_ids=tuple(ids[response.num_prompt_tokens :]),
            routing=b"" if chosen is None else chosen.numpy().tobytes(),
        )
    return samples


def _token_bytes(rollouts: Sequence[Rollout]) -> Tensor:
    tokens = [*chain.from_iterable(r.prompt_ids + r.response_ids for r in rollouts)]
    return torch.tensor(tokens, dtype=torch.int32).view(torch.uint8)


def _routing_bytes(rollouts: Sequence[Rollout]) -> Tensor:
    return torch.frombuffer(
        bytearray().join(r.routing for r in rollouts), dtype=torch.uint8
    )
