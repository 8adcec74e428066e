"""vLLM inside the training ranks, as its external launcher has it: one worker in each rank."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from megatron_opsft.records import Rollout, Sample
from megatron_opsft.rollout.engine import (
    Checksums,
    EngineSettings,
    EngineShare,
    EngineWeights,
    RolloutEngine,
    SamplingSettings,
    Scores,
    SpecCounts,
    Take,
)
from megatron_opsft.rollout.limits import check_engine_ranks
from megatron_opsft.rollout.requests import Decoder, make_rollouts
from megatron_opsft.rollout.vllm.core import VllmCore
from megatron_opsft.rollout.vllm.layout import checked_stream
from megatron_opsft.weights.rules import WeightTable


class VllmEngine(RolloutEngine):
    """`RolloutEngine`; `tp` consecutive ranks are one engine. Holds no weights before the first
    update.
    """

    def __init__(
        self,
        settings: EngineSettings,
        table: WeightTable,
        tokenizer: Decoder,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        """Called by every rank, after the job's process groups were made.

        Errors: `UserError` when rollout.tp does not divide the world, or vLLM refuses the model.
        """
        check_engine_ranks(settings.tp, world_size)
        self.version: int | None = None
        self.tokenizer = tokenizer
        self.share = EngineShare(
            index=rank // settings.tp,
            count=world_size // settings.tp,
            num_ranks=settings.tp,
            answers=rank % settings.tp == 0,
        )
        self._tp_rank = rank % settings.tp
        self._can_sleep = settings.is_cuda
        self._asleep = False
        self._core = VllmCore(settings, table, rank)
        self.layout = self._core.layout
        (self._tensors,) = self._core.rpc("opsft_tensors")

    def stream(self, take: Take, sampling: SamplingSettings) -> Iterator[list[Rollout]]:
        """See `RolloutEngine.stream`. RuntimeError before the first complete update."""
        if self.version is None:
            raise RuntimeError("the rollout engine holds no complete set of weights")
        for ended in self._core.stream(take, sampling):
            answers = ended if self.share.answers else []
            yield make_rollouts(
                [request for request, _ in answers],
                [ids for _, ids in answers],
                end_token_ids=sampling.end_token_ids,
                tokenizer=self.tokenizer,
                version=self.version,
            )

    def take_spec_counts(self) -> SpecCounts:
        """See `RolloutEngine.take_spec_counts`; all ranks of an engine count the same."""
        return self._core.take_spec_counts() if self.share.answers else SpecCounts()

    def score(self, samples: Sequence[Sample]) -> Scores:
        """See `RolloutEngine.score`."""
        return self._core.score(samples)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine.load_weights`: vLLM's own update of a running model."""
        self.begin_update()
        self._core.rpc(
            "reload_weights", weights_iterator=checked_stream(tensors, self.layout.hf_columns)
        )
        self.finish_update(version)

    def load_files(self, files: Sequence[Path], version: int) -> None:
        """See `FileReader.load_files`: by vLLM's own readers and loaders."""
        (tensors,) = self._core.rpc("opsft_read_files", [str(file) for file in files])
        known = ((name, tensor) for name, tensor in tensors if name in self.layout.hf_columns)
        self.load_weights(known, version)

    def begin_update(self) -> None:
        """See `RolloutEngine.begin_update`. The KV cache stays unmapped until the end."""
        self.version = None
        if self._asleep:
            self._core.llm.wake_up(tags=["weights"])

    def finish_update(self, version: int) -> None:
        """See `RolloutEngine.finish_update`."""
        if self._asleep:
            self._core.llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self._tensors.forget()
        self._core.drop_cache()
        self.version = version

    def weights(self) -> EngineWeights:
        """See `RolloutEngine.weights`."""
        return EngineWeights(
            tp_rank=self._tp_rank,
            tensors=self._tensors,
            packed=self._tensors.packed(self.layout.parameters_of(self._tp_rank)),
        )

    def checksums(self, cuts: int) -> Checksums:
        """See `RolloutEngine.checksums`."""
        return self._core.checksums(cuts)

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`; on a CPU there is nothing to give back."""
        if self._can_sleep and not self._asleep:
            self.version = None
            self._core.llm.sleep(level=2)
            self._asleep = True

    def close(self) -> None:
        """Drop the model and vLLM's process groups."""
        self.version = None
        del self._tensors
        self._core.close()
