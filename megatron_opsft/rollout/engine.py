"""What the trainer asks of a rollout engine; how a step's work is cut into batches and shared."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from megatron_opsft.records import Rollout
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How to sample; max_response_tokens counts the end token. Several end tokens may be given."""

    temperature: float
    top_p: float
    max_response_tokens: int
    end_token_ids: tuple[int, ...]


class RolloutEngine(Protocol):
    """Samples from the current weights. Lives on every rank; no method waits for another rank."""

    def generate(
        self, prompts: Sequence[PromptRequest], sampling: SamplingSettings
    ) -> list[Rollout]:
        """All responses, in the order of the prompts and of their samples.

        Prompts of the same problem must not ask for the same sample index.
        """

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every weight by a stream of (HF name, full tensor), consumed one by one.

        Strict: ValueError for an unknown name, a wrong shape, a name that comes twice or one that
        is missing at the end. The second name of tied weights is optional and must bring the same
        values. After an error the engine refuses to generate until a load succeeds.
        """

    def weight(self, hf_name: str) -> Tensor:
        """The live weight, not a copy; KeyError for an unknown name."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every live weight once, under its HF name; tied weights under their first name."""

    def close(self) -> None:
        """Free memory and processes; the engine is not used afterwards."""


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


def my_share(
    requests: Sequence[PromptRequest], batch_size: int, rank: int, num_ranks: int
) -> list[PromptRequest]:
    """The part of a step's requests that one of `num_ranks` generating ranks takes; may be empty.

    Whole batches of `split_batches` are dealt out in turn, and splitting a share again gives the
    same batches. So the responses that are decoded together do not depend on the number of ranks.
    """
    batches = split_batches(requests, batch_size)
    return [request for batch in batches[rank::num_ranks] for request in batch]
