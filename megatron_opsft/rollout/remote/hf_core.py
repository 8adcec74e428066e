"""One Hugging Face engine in a process of its own: what `VllmCore` is for vLLM."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_opsft.data.prompts import load_tokenizer
from megatron_opsft.records import Sample
from megatron_opsft.rollout.draft_counts import DraftCounts
from megatron_opsft.rollout.engine import (
    Checksums,
    EngineSettings,
    Patient,
    SamplingSettings,
    Scores,
)
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.rollout.hf.layout import hf_layout
from megatron_opsft.rollout.hf.speculation import Speculation
from megatron_opsft.rollout.requests import PromptRequest, single_requests, split_batches
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.spanning_group import Meeting
from megatron_opsft.transfer.receiver import Receiver, Way
from megatron_opsft.weights.rules import WeightTable


class HfCore:
    """Without weights at first."""

    packs_head = False

    def __init__(self, settings: EngineSettings, table: WeightTable, device: Device) -> None:
        dtype = getattr(torch, settings.dtype)
        self.batch_size = settings.batch_size
        self._engine = HfEngine.from_config(
            settings.model_dir,
            load_tokenizer(settings.model_dir),
            dtype=dtype,
            device=device.torch_device,
            batch_size=settings.batch_size,
            exact=settings.dtype == "float32",
            speculation=Speculation.of(settings.speculation),
        )
        # The trainer's order of the names.
        self._engine.layout = hf_layout(table.hf_shapes())
        self._receiver = Receiver(device.torch_device, dtype)

    def sample(
        self,
        prompts: Sequence[PromptRequest],
        sampling: SamplingSettings,
        beat: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """See `VllmCore.sample`."""
        batches = iter(split_batches(prompts, self.batch_size))
        found: dict[tuple[str, int], list[int]] = {}
        for ended in self.stream(lambda room: next(batches, ()), sampling):
            found |= {(s.problem_id, s.sample_indices[0]): ids for s, ids in ended}
            beat()
        return [found[p.problem_id, index] for p in prompts for index in p.sample_indices]

    def stream(
        self, take: Patient, sampling: SamplingSettings
    ) -> Iterator[list[tuple[PromptRequest, list[int]]]]:
        """See `VllmCore.stream`; a batch is taken when the last one is through."""
        running: dict[tuple[str, int], PromptRequest] = {}

        def next_batch(room: int, engine: int = 0) -> Sequence[PromptRequest]:
            batch = take(room) or ()  # an idle engine is not told to ask again
            running.update({(s.problem_id, s.sample_indices[0]): s for s in single_requests(batch)})
            return batch

        for rollouts in self._engine.stream(next_batch, sampling):
            yield [
                (running.pop((r.problem_id, r.sample_index)), list(r.response_ids))
                for r in rollouts
            ]

    def take_draft_counts(self) -> DraftCounts:
        """See `RolloutEngine.take_draft_counts`."""
        return self._engine.take_draft_counts()

    def score(self, samples: Sequence[Sample]) -> Scores:
        """See `RolloutEngine.score`."""
        return self._engine.score(samples)

    def checksums(self, cuts: int) -> Checksums:
        """See `RolloutEngine.checksums`."""
        return self._engine.checksums(cuts)

    def parameter(self, name: str) -> list[Tensor]:
        """One parameter, on the CPU."""
        return [self._engine.weight(name).cpu()]

    def join(self, meeting: Meeting, first_rank: int, own_host: str) -> str:
        """See `Receiver.join`."""
        return self._receiver.join(meeting, first_rank, own_host)

    def plan(self, ways: Sequence[Way]) -> None:
        """See `Receiver.plan`."""
        self._receiver.plan(ways[0], dict(self._engine.named_weights()))

    def receive(self) -> str:
        """See `Receiver.receive`."""
        self._engine.begin_update()
        reason = self._receiver.receive(lambda stream: self._engine.load_weights(stream, 0))
        if not reason:
            self._engine.finish_update(0)
        return reason

    def why_not_in_place(self) -> str:
        """Nothing stands against it."""
        return ""
