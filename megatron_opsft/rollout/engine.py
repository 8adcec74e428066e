"""The interface of a rollout engine, as the trainer uses it."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from megatron_opsft.models.weights.rectangles import Parameter
from megatron_opsft.records import Rollout, Sample, TokenIds, record
from megatron_opsft.rollout.requests import Decoder, ResponseRequest


@record
class SamplingSettings:
    """How to sample a response."""

    temperature: float
    """0 takes the most probable token each time, and ignores top_p."""
    top_p: float
    max_response_tokens: int
    """The end token counts."""
    end_token_ids: TokenIds
    """A response ends with any of these."""
    seeded: bool = True
    """True: each response has random numbers of its own."""


@record
class EngineShare:
    """The engine that this rank belongs to, among all engines of the job."""

    index: int
    """Which of the `count` engines it is."""
    count: int
    num_ranks: int = 1
    """Tensor-parallel ranks of an engine. All make the same requests, one gets the answers."""
    answers: bool = True
    """True on the rank that gets the answers."""


JOB_ID_VARIABLE = "MEGATRON_OPSFT_JOB_ID"  # tells worker processes the id of their job


@record
class EngineSettings:
    """The settings of an engine; fields without a text are keys of `model`, `run` or `rollout`."""

    model_dir: Path
    dtype: Literal["float32", "bfloat16"]
    is_cuda: bool
    tp: int
    """Ranks that share the engine."""
    max_tokens: int
    """The longest prompt and response together."""
    batch_size: int
    """Responses that are decoded at the same time."""
    gpu_memory_fraction: float
    """Share of the GPU's memory for an engine that reserves its cache at the start."""
    kv_cache_bytes: int | None
    """Size of the cache that such an engine reserves; None: it chooses."""
    seed: int
    collective_minutes: float
    """Timeout of the engine's own collectives, the same as of the trainer's."""
    rank: int
    world_size: int
    job_id: str = ""
    """The same on all ranks of a job, and different in every other job."""
    seeded: bool = True
    deep_sleep: bool = False
    speculative: Mapping[str, Any] | None = None
    notes_routing: bool = False
    """True if `Rollout.routing` and `Scores.routing` are needed."""


@record
class EngineLayout:
    """The place of every HF tensor in the parameters of each of the engine's ranks."""

    tp_size: int
    tp_rank: int
    """Tensor-parallel rank of this rank."""
    parameters_of: Callable[[int], tuple[Parameter, ...]]
    """Tensor-parallel rank -> its parameters; all have the same names in the same order."""


@record
class Scores:
    """Log-probabilities of response tokens under the engine's current weights, at temperature 1,
    whatever temperature they were sampled at.
    """

    log_probs: tuple[tuple[float, ...], ...]
    """For each sample, one of each response token."""
    stale_tokens: int
    """Tokens of the first sample whose keys and values the engine would have taken from its cache;
    after a weight sync this must be 0.
    """
    routing: tuple[bytes, ...] = ()
    """For each sample, in the format of `Sample.routing`, if it is noted."""


Take = Callable[[int], Sequence[ResponseRequest]]
"""Called by an engine for more work: returns at most so many requests as it has room for, or none
if no work is left.
"""


class RolloutEngine(Protocol):
    """Samples from the current weights. Every rank has one, and every rank calls every method."""

    tokenizer: Decoder
    layout: EngineLayout
    share: EngineShare
    version: int | None
    """Version of the weights; None: they are incomplete, and nothing may be sampled from them."""

    def generate(
        self, requests: Sequence[ResponseRequest], sampling: SamplingSettings
    ) -> list[Rollout]:
        """Return all responses in the order of the requests; none on ranks whose `share.answers` is
        false.

        No two requests may be for the same sample of a problem. The longest prompts come first, so
        that a batch has little padding.
        """
        longest_first = iter(
            sorted(requests, key=lambda request: -len(request.prompt_ids))
        )
        rollouts = {}
        for finished in self.stream(lambda n: list(islice(longest_first, n)), sampling):
            for rollout in finished:
                rollouts[rollout.problem_id, rollout.sample_index] = rollout
        if not self.share.answers:
            return []
        return [
            rollouts[request.problem_id, request.sample_index] for request in requests
        ]

    def stream(self, take: Take, sampling: SamplingSettings) -> Iterator[list[Rollout]]:
        """Yield responses as they finish, until `take` has no more work.

        A list comes every few tokens; it is empty if none has finished, and always where
        `share.answers` is false. `take` must return the same requests on all tensor-parallel ranks
        of an engine. Errors: RuntimeError before the first complete update of the weights.
        """

    def spec_counts(self) -> Counter[str]:
        """Count what this rank's engine has done so far: `drafts`, checks of speculative tokens of
        a response; `draft_tokens`, the tokens checked; `accepted`, those that were right.
        """
        return Counter()

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score these responses; to be called right after a weight sync."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every weight by a stream of (HF name, whole tensor), consumed one by one.

        The stream has all tensors of the model, in the order of `Exporter.stream`. After an error
        the engine refuses to generate until an update succeeds.
        """
        self.begin_update()
        self.copy_weights(tensors)
        self.finish_update(version)

    def copy_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the stream of `load_weights` into the engine; called between `begin_update` and
        `finish_update`.
        """

    def copy_files(self, names_by_file: Mapping[Path, Collection[str]]) -> None:
        """Copy into the engine every weight from a Hugging Face model's weight files, which were
        compared with its config.json; called between `begin_update` and `finish_update`. Only
        engines with `EngineTraits.reads_files` can do so.

        names_by_file: names of the tensors to read from each file, which may hold older ones, too.
        """
        raise NotImplementedError

    def weights(self) -> Mapping[str, Tensor]:
        """Return the live parameters of this rank, to be read and written; they have the names and
        shapes of its layout.
        """

    def begin_update(self) -> None:
        """Forbid sampling until `finish_update`; called before weights are written in place."""
        self.version = None

    def finish_update(self, version: int) -> None:
        """Drop caches and set `version`; called when all weights were written in place."""
        self.version = version

    def draft_fault(self) -> str:
        """Say how the draft model differs from the one that was loaded; "" if it does not."""
        return ""

    def sleep(self) -> None:
        """Free the device's memory until the next update, if the engine can; weights are lost."""

    def close(self) -> None:
        """Free memory and processes; the engine must not be used afterwards."""
