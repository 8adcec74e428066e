"""What ranks tell each other of a step's responses: facts to all, tokens only to where they are
packed.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_opsft.methods.batch import has_unclosed_think
from megatron_opsft.records import (
    FinishReason,
    Outcome,
    Problem,
    ResponseFacts,
    Rollout,
    Sample,
    Verdict,
)
from megatron_opsft.runtime.distributed import Layout, broadcast_in_replica
from megatron_opsft.runtime.exchange import all_gather_bytes, route_bytes

_OUTCOMES = list(Outcome)
_NUM_FACTS = 8  # int32 of a response: the fields of `ResponseFacts` but for its rank


def share_facts(
    rollouts: Sequence[Rollout],
    verdicts: Sequence[Verdict],
    problems: Sequence[Problem],
    *,
    prompts_open_think: bool = False,
) -> list[ResponseFacts]:
    """Facts of all ranks' responses, in the order of the step's problems and sample indices, so
    that the number of ranks cannot matter. Collective over the world; 32 bytes a response.

    rollouts, verdicts: this rank's; problems: the step's, the same on every rank.
    """
    place_of = {problem.id: place for place, problem in enumerate(problems)}
    rows = [
        (
            place_of[rollout.problem_id],
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
    order = np.lexsort((facts[:, 1], facts[:, 0]))  # by place, then sample index
    place, sample, prompt, length, outcome, ended, unclosed, slot = facts[order].T
    columns = (
        *(column.tolist() for column in (place, sample, prompt, length)),
        map(_OUTCOMES.__getitem__, outcome.tolist()),
        *(column.astype(bool).tolist() for column in (ended, unclosed)),
        *(column.tolist() for column in (ranks[order], slot)),
    )
    return list(map(ResponseFacts, *columns))


Fetch = Callable[[Sequence[Sequence[int]]], Mapping[int, Sample]]
"""numbers_of: for each data-parallel rank the numbers of the samples that it packs -> this rank's
samples by number. Called by every rank with the same numbers.
"""


def fetch_from_ranks(
    responses: Sequence[ResponseFacts],
    rollouts: Sequence[Rollout],
    problems: Sequence[Problem],
    layout: Layout,
    device: torch.device,
) -> Fetch:
    """How tokens get to the replica that packs them: int32, from the rank that holds a response to
    the first rank of the replica, and from there to the replica's others.

    responses: those to be trained on; the numbers of `Fetch` count them. rollouts: this rank's.
    device: where a collective of the replica takes its tensors.
    """

    def fetch(numbers_of: Sequence[Sequence[int]]) -> dict[int, Sample]:
        parts = {}
        for dp_rank, numbers in enumerate(numbers_of):
            here = [n for n in sorted(numbers) if responses[n].rank == layout.rank]
            if here:
                tokens = [_tokens(rollouts[responses[n].slot]) for n in here]
                parts[layout.first_of_replica(dp_rank)] = torch.cat(tokens).view(torch.uint8)
        came = {rank: part.view(torch.int32) for rank, part in route_bytes(parts).items()}
        mine = sorted(numbers_of[layout.dp_rank], key=lambda n: (responses[n].rank, n))
        sizes = [responses[n].num_tokens for n in mine]
        flat = torch.empty(sum(sizes), dtype=torch.int32)
        if came:  # the first rank of a replica that packs something
            flat = torch.cat(list(came.values()))
        flat = broadcast_in_replica(flat.to(device)).cpu()
        return {
            n: _sample(responses[n], problems[responses[n].place].id, part.tolist())
            for n, part in zip(mine, flat.split(sizes), strict=True)
        }

    return fetch


def _tokens(rollout: Rollout) -> Tensor:
    return torch.tensor(rollout.prompt_ids + rollout.response_ids, dtype=torch.int32)


def _sample(response: ResponseFacts, problem_id: str, tokens: list[int]) -> Sample:
    return Sample(
        problem_id=problem_id,
        sample_index=response.sample_index,
        prompt_ids=tuple(tokens[: response.num_prompt_tokens]),
        response_ids=tuple(tokens[response.num_prompt_tokens :]),
    )
