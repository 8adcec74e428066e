"""The interface of a rollout engine, as the trainer uses it."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from megatron_opsft.models.weights.rectangles import Parameter
from megatron_opsft.records import Rollout, Sample
from megatron_opsft.rollout.requests import Decoder, ResponseRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How to sample; max_response_tokens counts the end token. Several end tokens may be given.

    temperature: 0 takes the most probable token each time, and leaves top_p out. seeded: each
    response has random numbers of its own.
    """

    temperature: float
    top_p: float
    max_response_tokens: int
    end_token_ids: tuple[int, ...]
    seeded: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShare:
    """Which engine this rank belongs to: the one with `index` among the `count` engines of the job.

    num_ranks: tensor-parallel ranks of an engine. They all make the same requests, and one of them
    gets the answers; answers: whether it is this one.
    """

    index: int
    count: int
    num_ranks: int = 1
    answers: bool = True


JOB_ID_VARIABLE = "MEGATRON_OPSFT_JOB_ID"  # in which worker processes find a job's id


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is built for.

    tp: ranks that share it. max_tokens: the longest prompt and response together. batch_size:
    responses decoded at once.
    gpu_memory_fraction, kv_cache_bytes: of an engine that sets its cache aside.
    collective_minutes: after which its own collectives give up, as those of the trainer.
    rank, world_size: of the job. job_id: the same on all ranks of a job and no other. seeded,
    deep_sleep, speculative: as in `rollout`. notes_routing: `Rollout.routing` and
    `Scores.routing` are wanted.
    """

    model_dir: Path
    dtype: Literal["float32", "bfloat16"]
    is_cuda: bool
    tp: int
    max_tokens: int
    batch_size: int
    gpu_memory_fraction: float
    kv_cache_bytes: int | None
    seed: int
    collective_minutes: float
    rank: int
    world_size: int
    job_id: str = ""
    seeded: bool = True
    deep_sleep: bool = False
    speculative: Mapping[str, Any] | None = None
    notes_routing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """Where every HF tensor sits in the engine's parameters, for each of its tensor-parallel ranks.

    tp_rank: this rank's. parameters_of: tensor-parallel rank -> its parameters; the same names in
    the same order for all.
    """

    tp_size: int
    tp_rank: int
    parameters_of: Callable[[int], tuple[Parameter, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log-probabilities of response tokens under the engine's current weights and temperature 1,
    whatever they were sampled at.

    stale_tokens: tokens of the first sample for which the engine would have used keys and values
    that it had cached before; right after a push there must be none. routing: of each sample, as
    `Sample` has it, where it is wanted.
    """

    log_probs: tuple[tuple[float, ...], ...]
    stale_tokens: int
    routing: tuple[bytes, ...] = ()


Take = Callable[[int], Sequence[ResponseRequest]]
"""Where an engine's work comes from: at most as many requests as it has room for; none: no work is
left.
"""


class RolloutEngine(Protocol):
    """Samples from the current weights. Lives on every rank, and every rank calls every method.

    version: of the weights; None: they are not to be sampled from.
    """

    tokenizer: Decoder
    layout: EngineLayout
    share: EngineShare
    version: int | None

    def generate(
        self, requests: Sequence[ResponseRequest], sampling: SamplingSettings
    ) -> list[Rollout]:
        """All responses, in the order of the requests; empty where `share.answers` is false.

        No two requests may be for the same sample of a problem. The longest prompts come first, so
        that a batch has little padding.
        """
        longest_first = iter(
            sorted(requests, key=lambda request: -len(request.prompt_ids))
        )
        finished = self.stream(lambda room: list(islice(longest_first, room)), sampling)
        done = {
            (r.problem_id, r.sample_index): r for rollouts in finished for r in rollouts
        }
        if not self.share.answers:
            return []
        return [done[request.problem_id, request.sample_index] for request in requests]

    def stream(self, take: Take, sampling: SamplingSettings) -> Iterator[list[Rollout]]:
        """Responses as they finish, until `take` has no work left and all are through.

        Lists come every few tokens, if only empty ones; where `share.answers` is false all are.
        The tensor-parallel ranks of an engine must get the same answers from `take`. Errors:
        RuntimeError before the first complete update of the weights.
        """

    def spec_counts(self) -> Counter[str]:
        """Of the engine of this rank, so far: `drafts`, how often speculative tokens of a response
        were checked; `draft_tokens`, how many; `accepted`, those that were right.
        """
        return Counter()

    def score(self, samples: Sequence[Sample]) -> Scores:
        """How probable the engine finds these responses; call it right after a push."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every weight by a stream of (HF name, full tensor), consumed one by one.

        They are all tensors of the model, as `Exporter` streams them. After an error the engine
        refuses to generate until an update succeeds.
        """
        self.begin_update()
        self.copy_weights(tensors)
        self.finish_update(version)

    def copy_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """What an engine does with the stream of `load_weights`."""

    def load_files(
        self, names_by_file: Mapping[Path, Collection[str]], version: int
    ) -> None:
        """Replace every weight by those in a Hugging Face model's weight files, which were compared
        with its config.json. Only of engines that can (`EngineTraits.reads_files`).

        names_by_file: the tensors to read from each; a file may hold others, such as older ones.
        """
        raise NotImplementedError

    def weights(self) -> Mapping[str, Tensor]:
        """What the engine computes with on this rank, to be read and written: live parameters, by
        the names and shapes of its layout.
        """

    def begin_update(self) -> None:
        """Before weights are written in place: no generation until `finish_update`."""
        self.version = None

    def finish_update(self, version: int) -> None:
        """After all were written in place: caches are dropped, `version` is current."""
        self.version = version

    def draft_fault(self) -> str:
        """How the draft model is not as it was loaded; "" where it is, or there is none."""
        return ""

    def sleep(self) -> None:
        """Free the device's memory until the next update, where the engine can; the weights are
        lost.
        """

    def close(self) -> None:
        """Free memory and processes; the engine is not used afterwards."""
