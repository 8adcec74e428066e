"""Weights between the trainer's shards and the rollout engine, both ways, through the same
table.
"""

import time
from collections.abc import Iterator

from torch import Tensor

from megatron_opsft.records import SyncResult
from megatron_opsft.rollout.engine import RolloutEngine
from megatron_opsft.weights.export import Exporter
from megatron_opsft.weights.shards import ModelShards


class WeightSync:
    """Pushes and pulls; `version` says which weights the engine holds: the number of updates
    behind them.
    """

    def __init__(self, shards: ModelShards, engine: RolloutEngine) -> None:
        self._shards = shards
        self._engine = engine
        self.exporter = Exporter(shards)
        self.version = -1

    def push(self, version: int) -> SyncResult:
        """Trainer -> engine, streamed; collective over all ranks. The engine checks that nothing
        is missing.
        """
        start = time.perf_counter()
        counted = _Counted(self.exporter.stream())
        self._engine.load_weights(counted, version)
        self.version = version
        return SyncResult(
            version=version,
            num_tensors=counted.num_tensors,
            num_bytes=counted.num_bytes,
            seconds=time.perf_counter() - start,
        )

    def pull(self) -> SyncResult:
        """Engine -> trainer: every shard is overwritten from the engine's live weights.

        The caller then reloads the optimizer's main weights from the model's.
        """
        start = time.perf_counter()

        def read(hf_name: str, axis: int, first: int, last: int) -> Tensor:
            return self._engine.weight(hf_name).narrow(axis, first, last - first)

        self._shards.fill(read)
        return SyncResult(
            version=self.version,
            num_tensors=len(self._shards.parameters),
            num_bytes=sum(t.numel() * t.itemsize for _, t in self._shards.parameters),
            seconds=time.perf_counter() - start,
        )


class _Counted:
    """An iterator that counts what passes through it."""

    def __init__(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._tensors = tensors
        self.num_tensors = 0
        self.num_bytes = 0

    def __iter__(self) -> "_Counted":
        return self

    def __next__(self) -> tuple[str, Tensor]:
        name, tensor = next(self._tensors)
        self.num_tensors += 1
        self.num_bytes += tensor.numel() * tensor.itemsize
        return name, tensor
