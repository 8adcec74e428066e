"""What engines are asked for, and how a step's requests are cut into batches and shared."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import attrgetter

from megatron_opsft.rollout.sampling import response_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """One prompt and the responses wanted of it, each with its sample index and its seed.

    A seed is in [0, 2^63).
    """

    problem_id: str
    prompt_ids: tuple[int, ...]
    sample_indices: tuple[int, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.sample_indices:
            raise ValueError(f"empty prompt or no samples asked for: problem {self.problem_id}")
        if len(self.seeds) != len(self.sample_indices):
            raise ValueError(f"one seed per response is needed: problem {self.problem_id}")


def make_request(
    problem_id: str, prompt_ids: Sequence[int], group_size: int, run_seed: int, step: int
) -> PromptRequest:
    """A request for a group of responses, seeded by (run seed, step, problem, sample index)."""
    indices = tuple(range(group_size))
    return PromptRequest(
        problem_id=problem_id,
        prompt_ids=tuple(prompt_ids),
        sample_indices=indices,
        seeds=tuple(response_seed(run_seed, step, problem_id, index) for index in indices),
    )


def single_requests(requests: Iterable[PromptRequest]) -> list[PromptRequest]:
    """A request of its own for each response, in their order."""
    return [
        replace(request, sample_indices=(index,), seeds=(seed,))
        for request in requests
        for index, seed in zip(request.sample_indices, request.seeds, strict=True)
    ]


def join_requests(singles: Sequence[PromptRequest]) -> list[PromptRequest]:
    """Neighbours for the same problem as one request: `single_requests` the other way round."""
    joined = []
    for _, same in groupby(singles, key=attrgetter("problem_id")):
        first, *others = same
        indices = chain(first.sample_indices, *(other.sample_indices for other in others))
        seeds = chain(first.seeds, *(other.seeds for other in others))
        joined.append(replace(first, sample_indices=tuple(indices), seeds=tuple(seeds)))
    return joined


def split_batches(
    requests: Sequence[PromptRequest], batch_size: int
) -> list[tuple[PromptRequest, ...]]:
    """Cut into batches of exactly `batch_size` responses (the last one: what is left).

    Prompts go by length, longest first, so that a batch has little padding and the small last batch
    is the cheapest. A group that does not fit into what is left of a batch is divided between two.
    """
    batches: list[tuple[PromptRequest, ...]] = []
    current: list[PromptRequest] = []
    room = batch_size
    for request in sorted(requests, key=lambda request: -len(request.prompt_ids)):
        start = 0
        while start < len(request.sample_indices):
            part = slice(start, start + room)
            indices = request.sample_indices[part]
            current.append(replace(request, sample_indices=indices, seeds=request.seeds[part]))
            start += len(indices)
            room -= len(indices)
            if room == 0:
                batches.append(tuple(current))
                current, room = [], batch_size
    if current:
        batches.append(tuple(current))
    return batches


def dealt_size(num_responses: int, batch_size: int, num_ranks: int) -> int:
    """Responses that are dealt out together: `batch_size`, or fewer so that every rank is busy."""
    return max(1, min(batch_size, -(-num_responses // num_ranks)))


def my_share(
    requests: Sequence[PromptRequest], batch_size: int, rank: int, num_ranks: int
) -> list[PromptRequest]:
    """The part of a step's requests that one of `num_ranks` generating ranks takes; may be empty.

    Whole batches of `split_batches` are dealt out in turn, and splitting a share again gives the
    same batches. So the responses that are decoded together do not depend on the number of ranks,
    as long as that leaves `batch_size` alone (`dealt_size`).
    """
    batches = split_batches(requests, batch_size)
    return [request for batch in batches[rank::num_ranks] for request in batch]
