"""What ranks tell each other of a step's responses: facts to all, tokens only to where they are
packed.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

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
_NUM_FACTS = 8  # int32 of a response: the fields of `Response` but for rank and advantage


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
    ranks = np.repeat(np.arange(len(parts)), [len(part) // (4 * _NUM_FACTS) for part in parts])
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
) -> dict[int, Sample]:
    """The samples that this rank packs, by their index in `responses`. Tokens travel as int32, from
    the rank that holds a response to the first rank of the replica that packs it, and from there to
    the replica's others. Collective over the world.

    responses, indices_of: those to be trained on, and for each data-parallel rank the indices of
    those that it packs; the same on every rank. rollouts: this rank's. device: where a collective
    of the replica takes its tensors.
    """
    parts = {}
    for dp_rank, indices in enumerate(indices_of):
        here = [i for i in sorted(indices) if responses[i].rank == layout.rank]
        if here:
            held = [rollouts[responses[i].rollout_index] for i in here]
            tokens = [*chain.from_iterable(r.prompt_ids + r.response_ids for r in held)]
            packed = torch.tensor(tokens, dtype=torch.int32).view(torch.uint8)
            parts[layout.first_of_replica(dp_rank)] = packed
    came = {rank: part.view(torch.int32) for rank, part in route_bytes(parts).items()}
    mine = sorted(indices_of[layout.dp_rank], key=lambda i: (responses[i].rank, i))
    sizes = [responses[i].sequence_tokens for i in mine]
    flat = torch.empty(sum(sizes), dtype=torch.int32)
    if came:  # the first rank of a replica that packs something
        flat = torch.cat(list(came.values()))
    flat = broadcast_in_replica(flat.to(device)).cpu()
    return {
        i: _sample(responses[i], problems[responses[i].problem_index].id, part.tolist())
        for i, part in zip(mine, flat.split(sizes), strict=True)
    }


def _sample(response: Response, problem_id: str, tokens: list[int]) -> Sample:
    return Sample(
        problem_id=problem_id,
        sample_index=response.sample_index,
        prompt_ids=tuple(tokens[: response.num_prompt_tokens]),
        response_ids=tuple(tokens[response.num_prompt_tokens :]),
    )
