"""Writing of this rank's share of a checkpoint: copied at once, then planned and written by
torch.distributed.checkpoint in a thread. And `complete.json`, which holds the step, the run's
counters, and checksums of every file and of itself.
"""

import io
import json
import pickle
import threading
import zlib
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.futures import Future

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.model_paths import (
    COMMON_NAME,
    FORMAT_NAME,
    TORCH_DIST_FORMAT,
)
from megatron_opsft.records import JsonObject
from megatron_opsft.runtime.distributed import gather_from_all
from megatron_opsft.runtime.durable import (
    COMPLETE,
    describe_failed_write,
    full_disk_behind,
    remove,
    step_in,
    sync_path,
)
from megatron_opsft.runtime.libraries import collector_at_rest
from megatron_opsft.runtime.pinned import HostCopies

_BLOCK_BYTES = 1 << 22
_SEAL = "checksum"  # key of the checksum of everything else in `complete.json`

Checksums = dict[str, list[int]]  # file -> [size in bytes, CRC-32]


class CheckpointWrite:
    """One checkpoint that is being written to `directory`; all ranks create it and call `finish`.

    If a write fails, for example on a full disk, it fails for all ranks: the files are removed at
    once, because the run continues and needs the room, and `finish` tells the reason.
    """

    def __init__(
        self,
        state: dict[str, Any],
        directory: Path,
        group: dist.ProcessGroup,
        host_copies: HostCopies,
        *,
        copy: bool,
    ) -> None:
        """Copy the state and start the thread that writes it.

        state: Megatron's sharded state dict. group: all ranks, over gloo, only for the thread's
        collectives. host_copies: in use until `finish`. copy: copy tensors in the CPU's memory too;
        otherwise they must not change until `finish`.
        """
        self._directory = directory
        self._group = group
        self._host_copies = host_copies
        self._outcome: Checksums | str = {}
        sharded, common = save_preprocess(state, validate_access_integrity=False)
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded, keep_only_main_replica=True
        )
        tensors = [
            value for value in nested_values(by_key) if isinstance(value, ShardedTensor)
        ]
        staged = host_copies.take([tensor.data for tensor in tensors], copy=copy)
        for tensor, data in zip(tensors, staged, strict=True):
            tensor.data = data
        self._num_bytes = sum(data.nbytes for data in staged)
        buffer = io.BytesIO()
        torch.save(common, buffer)
        self._thread = threading.Thread(
            target=self._write,
            args=(mcore_to_pyt_state_dict(by_key), buffer.getvalue()),
            daemon=True,
        )
        self._thread.start()

    def _write(self, tensors: dict[str, Any], common: bytes) -> None:
        """Write the files of this rank to disk and compute their checksums; runs in the thread."""
        rank = dist.get_rank(self._group)
        is_first = rank == 0
        try:
            dcp.save(
                tensors,
                storage_writer=_Writer(self._directory, common),
                planner=_SharePlanner(flatten_state_dict=False),
                process_group=self._group,
            )
            checksums = {}
            for path in self._directory.iterdir():
                is_common = is_first and path.suffix != ".distcp"
                if is_common or path.name.startswith(f"__{rank}_"):
                    sync_path(path)
                    checksums[path.name] = size_and_crc(path)
            self._outcome = checksums
        except BaseException as error:  # torch's CheckpointException is no Exception
            reason: BaseException = error
            if isinstance(error, dcp.CheckpointException) and error.failures:
                reason, _ = next(iter(error.failures.values()))
            self._outcome = describe_failed_write(
                self._directory, self._num_bytes, reason
            )
            if is_first:
                remove(self._directory, quietly=True)

    @property
    def is_writing(self) -> bool:
        """True while this rank is writing."""
        return self._thread.is_alive()

    def finish(self) -> Checksums:
        """Wait for all ranks; return the checksums of all files. Collective over the world.

        Errors: `UserError`, on every rank, if a write failed.
        """
        self._thread.join()
        self._host_copies.release()
        files: Checksums = {}
        for outcome in gather_from_all([self._outcome]):
            if isinstance(outcome, str):
                raise UserError(outcome)
            files |= outcome
        return dict(sorted(files.items()))


class _SharePlanner(MCoreSavePlanner):
    """Planner that writes each rank's share as it is.

    Rank 0 needs the ranks' plans only for the metadata: they are sent to it pickled, and no plan is
    sent back.
    """

    def create_local_plan(self) -> SavePlan:
        self._local_plan = super().create_local_plan()
        return SavePlan([], planner_data=pickle.dumps(self._local_plan.items))

    def create_global_plan(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], Metadata]:
        """Return empty plans and the metadata; called on rank 0.

        Only counts elements: torch would compare all shares of the same rows with each other, which
        takes most of its time in a large job. Errors: `ValueError` if the number of elements to be
        written is not the tensor's.
        """
        with collector_at_rest(lasting=True):
            plans = [SavePlan(pickle.loads(plan.planner_data)) for plan in all_plans]
            _, metadata = create_default_global_save_plan(
                plans, rewrite_index_hints=False
            )
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                num_elements = sum(prod(chunk.sizes) for chunk in entry.chunks)
                if num_elements != prod(entry.size):
                    raise ValueError(f"{key} would not be written once as a whole")
        return [SavePlan([]) for _ in all_plans], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return this rank's plan, with the names of its files."""
        return replace(self._local_plan, storage_data=new_plan.storage_data)


class _Writer(dcp.FileSystemWriter):
    """torch's writer; on rank 0 it also makes the directory and the files without tensors."""

    def __init__(self, directory: Path, common: bytes) -> None:
        # The tensors are in the CPU's memory already: nothing is copied ahead from a GPU.
        super().__init__(directory, per_thread_copy_ahead=0)
        self._directory = directory
        self._common = common

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Make the directory; delete what a run that ended earlier left there."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            remove(self._directory, quietly=True)
            self._directory.parent.mkdir(exist_ok=True)
            self._directory.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan; torch would make a directory on every rank."""
        return plan

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        """Write the tensors; return torch's results, pickled. Errors: `OSError` for a full disk,
        because torch's own error does not tell other ranks the cause.
        """
        try:
            written = super().write_data(plan, planner).wait()
        except Exception as error:
            raise full_disk_behind(error) or error from None
        pickled: Future[list[bytes]] = Future()
        pickled.set_result([pickle.dumps(written)])
        return pickled

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the files without tensors; called on rank 0 when all ranks have written.

        results: what `write_data` returned, rank by rank.
        """
        (self._directory / COMMON_NAME).write_bytes(self._common)
        (self._directory / FORMAT_NAME).write_text(
            json.dumps(TORCH_DIST_FORMAT), encoding="utf-8"
        )
        with collector_at_rest(lasting=True):
            super().finish(metadata, [pickle.loads(pickled) for (pickled,) in results])
        # torch would send them to every rank, where nobody reads them.
        metadata.state_dict_metadata = {}
        metadata.storage_data = {}


def size_and_crc(path: Path) -> list[int]:
    """Return [size in bytes, CRC-32] of a file."""
    crc = size = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return [size, crc]


def sealed(manifest: JsonObject) -> bytes:
    """Return the content of `complete.json`: the manifest with a checksum of itself."""
    read_back = json.loads(json.dumps(manifest))
    return json.dumps({**read_back, _SEAL: _crc(read_back)}, indent=1).encode()


def _crc(manifest: JsonObject) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def read_manifest(path: Path) -> JsonObject | str:
    """Return the manifest in a checkpoint's `complete.json`, or a message if it is missing or
    damaged.
    """
    try:
        manifest = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        step, files, seal = manifest["step"], manifest["files"], manifest.pop(_SEAL)
        if step == step_in(path.name) and files.items() and seal == _crc(manifest):
            return manifest
    except OSError as error:
        return _unreadable(path / COMPLETE, error)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return f"checkpoint file {path / COMPLETE} is damaged"


def damage_of(path: Path, expected: list[int]) -> str | None:
    """Return how a file differs from the recorded size and checksum; None if it does not."""
    try:
        actual = size_and_crc(path)
    except OSError as error:
        return _unreadable(path, error)
    if actual[0] != expected[0]:
        return f"checkpoint file {path} is damaged: {actual[0]:,} bytes instead of {expected[0]:,}"
    if actual != expected:
        return f"checkpoint file {path} is damaged: its checksum differs"
    return None


def _unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"checkpoint file {path} is missing"
    return f"checkpoint file {path} cannot be read: {error.strerror}"
