"""This rank's part of a checkpoint: planned, copied and written by each rank alone.

Ranks meet when all have written: rank 0 then joins the metadata that each made of its own part.
Megatron's own background writers start processes, or come from another package. Here a thread
writes Megatron's buckets with Megatron's function: file writes, fsync and checksums leave Python to
the training loop.
"""

import os
import queue
import shutil
import threading
import zlib
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_opsft.model.checkpoint_plan import OwnPlan
from megatron_opsft.runtime.distributed import broadcast_object, gather_from_all, gather_on_first
from megatron_opsft.runtime.durable import describe_failed_write, full_disk_behind
from megatron_opsft.storage.dist_metadata import METADATA_NAME
from megatron_opsft.storage.metadata_parts import MetadataPart, metadata_part, write_metadata

_RESERVE = ".reserve"
_BLOCK_BYTES = 1 << 22

Checksums = dict[str, list[int]]  # file -> [size, CRC-32]


class CheckpointWrite:
    """One checkpoint on its way to `directory`; all ranks make it and call `finish`.

    The state may change as soon as it is made. A write that fails, as on a full disk, fails for all
    ranks alike: `finish` says so, and nothing is left of it.
    """

    def __init__(self, state: dict[str, Any], directory: Path, *, copy_cpu: bool) -> None:
        """state: Megatron's sharded state dict. copy_cpu: tensors on the CPU are copied too;
        without it they must not change until `finish`.
        """
        self._directory = directory
        self._checksums: Checksums = {}
        self._plan = OwnPlan()
        self._part = MetadataPart()  # of what this rank has written
        self._error: str | None = None
        self._num_bytes = 0
        self._request: Any = None
        self._thread: threading.Thread | None = None
        self._prepare_failure = broadcast_object(self._prepare())
        if self._prepare_failure is None:
            self._start(state, copy_cpu)

    def _prepare(self) -> str | None:
        """On rank 0: make the directory, see that there is room for the small files; what fails."""
        if dist.get_rank() != 0:
            return None
        shutil.rmtree(self._directory, ignore_errors=True)
        try:
            self._directory.parent.mkdir(exist_ok=True)  # but not a run's directory that is gone
            self._directory.mkdir()
            self._reserve(1 << 16)
            (self._directory / _RESERVE).unlink()
        except OSError as error:
            return describe_failed_write(self._directory, 1 << 16, error)
        return None

    def _reserve(self, num_bytes: int) -> None:
        """Room for the metadata, which rank 0 writes when all the others count on it."""
        file = os.open(self._directory / _RESERVE, os.O_WRONLY | os.O_CREAT)
        try:
            os.posix_fallocate(file, 0, num_bytes)
        finally:
            os.close(file)

    def _start(self, state: dict[str, Any], copy_cpu: bool) -> None:
        live = _addresses(state) if copy_cpu else set()
        _keep_write_results_here()
        self._request = dist_checkpointing.save(
            state,
            str(self._directory),
            self._plan,
            # Of every rank's plan on every rank; `_finalize` finds what is missing.
            validate_access_integrity=False,
            async_sharded_save=True,
            **_own_strategy(),
        )
        buckets = self._request.preload_fn() if self._request.preload_fn else []
        buckets = [
            (path, key, (data, _copied(tensors, live))) for path, key, (data, tensors) in buckets
        ]
        tensors = [tensor for _, _, (_, pairs) in buckets for _, tensor in pairs]
        self._num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._thread = threading.Thread(target=self._write, args=(buckets,), daemon=True)
        self._thread.start()

    def _write(self, buckets: list[Any]) -> None:
        """In a thread: the files of this rank, on disk, and their checksums. No collectives."""
        try:
            if dist.get_rank() == 0:
                self._reserve((1 << 20) + self._num_bytes // 100)
            transforms = self._request.async_fn.args[0] if buckets else []
            results: list[Any] = []
            for number, bucket in enumerate(buckets):
                outcome: queue.Queue[Any] = queue.Queue()
                tickets: queue.Queue[int] = queue.Queue()
                tickets.put(number)
                filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                    transforms, number, bucket, outcome, tickets, True
                )
                _, written = outcome.get()
                if isinstance(written, Exception):
                    raise written
                results += written
                self._checksums[bucket[1]] = checksum(Path(bucket[0]))
            self._part = metadata_part(self._plan.items, results)
        except Exception as error:  # it must reach the other ranks, which would wait for ever
            reason = full_disk_behind(error) or error
            self._error = describe_failed_write(self._directory, self._num_bytes, reason)
            # At once: the run goes on, and what it writes meanwhile must fit.
            for path in [self._directory / _RESERVE, *(bucket[0] for bucket in buckets)]:
                Path(path).unlink(missing_ok=True)

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> Checksums | str:
        """Wait for all ranks and let rank 0 write the metadata: the files, or what failed.

        The directory is gone then. Collective over the world.
        """
        if self._thread is not None:
            self._thread.join()
        errors = gather_from_all([e for e in (self._prepare_failure, self._error) if e])
        if not errors:
            errors = self._finalize()
        if errors:
            if dist.get_rank() == 0:
                shutil.rmtree(self._directory, ignore_errors=True)
            return errors[0]
        return dict(sorted(gather_from_all(list(self._checksums.items()))))

    def _finalize(self) -> list[str]:
        parts = gather_on_first(self._part)
        for function in self._request.finalize_fns:
            function()
        return broadcast_object(self._add_metadata(parts) if dist.get_rank() == 0 else [])

    def _add_metadata(self, parts: Iterator[MetadataPart]) -> list[str]:
        """On rank 0: what fails."""
        (self._directory / _RESERVE).unlink()
        whole = MetadataPart()
        for part in parts:
            whole.add(part)
        if missing := whole.missing():
            return [f"checkpoint {self._directory}: {missing[0]} was not written once as a whole"]
        try:
            write_metadata(whole, self._directory / METADATA_NAME)
            for path in self._directory.iterdir():
                if not path.name.endswith(".distcp"):
                    self._checksums[path.name] = checksum(path, sync=True)
        except OSError as error:
            return [describe_failed_write(self._directory, self._num_bytes, error)]
        return []


def _addresses(state: dict[str, Any]) -> set[int]:
    """Where the tensors of a state dict are."""
    tensors = (value.data for value in nested_values(state) if isinstance(value, ShardedTensor))
    return {tensor.data_ptr() for tensor in tensors if tensor is not None}


def _copied(
    pairs: list[tuple[Any, torch.Tensor]], live: set[int]
) -> list[tuple[Any, torch.Tensor]]:
    """Copies of the tensors that are still at these addresses; Megatron has copied the others."""
    return [(item, t.clone() if t.data_ptr() in live else t) for item, t in pairs]


def _own_strategy() -> dict[str, str]:
    """Newer Megatrons would by default hand the write to nvidia-resiliency-ext."""
    known = "async_strategy" in signature(dist_checkpointing.save).parameters
    return {"async_strategy": "mcore"} if known else {}


def _keep_write_results_here() -> None:
    """Give Megatron's writer a queue of this process for its results.

    By default it starts a manager process for them, for writers that are processes themselves.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def checksum(path: Path, *, sync: bool = False) -> list[int]:
    """[size, CRC-32] of a file. sync: it is on disk then."""
    crc = size = 0
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return [size, crc]
