"""This rank's part of a checkpoint: copied at once, then planned and written in a thread by
torch.distributed.checkpoint; and `complete.json`, which has its step, what the run counts, and
checksums of every file and of itself.
"""

import io
import json
import os
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

from megatron_opsft.models.storage.model_paths import (
    COMMON_NAME,
    FORMAT_NAME,
    TORCH_DIST_FORMAT,
)
from megatron_opsft.runtime.distributed import gather_from_all
from megatron_opsft.runtime.durable import (
    COMPLETE,
    describe_failed_write,
    full_disk_behind,
    remove,
    step_in,
)
from megatron_opsft.runtime.libraries import collector_at_rest
from megatron_opsft.runtime.pinned import HostCopies

_BLOCK_BYTES = 1 << 22
_SEAL = "checksum"  # of all else in `complete.json`

Checksums = dict[str, list[int]]  # file -> [size, CRC-32]


class CheckpointWrite:
    """One checkpoint on its way to `directory`; all ranks make it and call `finish`.

    A write that fails, as on a full disk, fails for all ranks alike: what was written is removed at
    once, since the run goes on and needs the room, and `finish` says why.
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
        """state: Megatron's sharded state dict. group: all ranks, over gloo, for the thread's
        collectives alone. host_copies: in use from now until `finish`. copy: tensors in the CPU's
        memory are copied too; without it they must not change until `finish`.
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
        arguments = (mcore_to_pyt_state_dict(by_key), buffer.getvalue())
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()

    def _write(self, tensors: dict[str, Any], common: bytes) -> None:
        """In the thread: the files of this rank, on disk, and their checksums."""
        is_first = dist.get_rank(self._group) == 0
        try:
            dcp.save(
                tensors,
                storage_writer=_Writer(self._directory, common),
                planner=_SharePlanner(flatten_state_dict=False),
                process_group=self._group,
            )
            own = f"__{dist.get_rank(self._group)}_"
            self._outcome = {
                path.name: checksum(path, sync=True)
                for path in self._directory.iterdir()
                if path.name.startswith(own) or (is_first and path.suffix != ".distcp")
            }
        except BaseException as error:  # torch's CheckpointException is no Exception
            failures = [
                failure for failure, _ in getattr(error, "failures", {}).values()
            ]
            reason = [*failures, error][0]
            self._outcome = describe_failed_write(
                self._directory, self._num_bytes, reason
            )
            if is_first:
                remove(self._directory, quietly=True)

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes."""
        return self._thread.is_alive()

    def finish(self) -> Checksums | str:
        """Wait for all ranks: the files, or what failed. Collective over the world."""
        self._thread.join()
        self._host_copies.release()
        files: Checksums = {}
        for outcome in gather_from_all([self._outcome]):
            if isinstance(outcome, str):
                return outcome
            files |= outcome
        return dict(sorted(files.items()))


class _SharePlanner(MCoreSavePlanner):
    """Writes the share of each rank as it is. Rank 0 needs the plans for the metadata alone: they
    come to it packed, and none goes back.
    """

    def create_local_plan(self) -> SavePlan:
        self._own = super().create_local_plan()
        return SavePlan([], planner_data=pickle.dumps(self._own.items))

    def create_global_plan(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], Metadata]:
        """On rank 0. Counts elements only: torch would compare all shares in the same rows, most of
        its time in a large job. Errors: `ValueError` for a tensor of which not every element would
        be written once.
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
        """This rank's own, with the names that its files get."""
        return replace(self._own, storage_data=new_plan.storage_data)


class _Writer(dcp.FileSystemWriter):
    """Writes as torch does; on rank 0 also the directory, and the files that hold no tensors."""

    def __init__(self, directory: Path, common: bytes) -> None:
        # What is to be written lies in the CPU's memory: nothing is copied ahead from a GPU.
        super().__init__(directory, per_thread_copy_ahead=0)
        self._directory, self._common = directory, common

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Make the directory, but not that of a run which is gone."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            remove(self._directory, quietly=True)
            self._directory.parent.mkdir(exist_ok=True)
            self._directory.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Without torch's directories, which every rank would make."""
        return plan

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        """What was written, packed. Errors: `OSError` for a full disk; torch's own error tells the
        other ranks no cause.
        """
        try:
            written = super().write_data(plan, planner).wait()
        except Exception as error:
            raise full_disk_behind(error) or error from None
        packed: Future[list[bytes]] = Future()
        packed.set_result([pickle.dumps(written)])
        return packed

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """On rank 0, when all have written. results: of `write_data`, rank by rank."""
        (self._directory / COMMON_NAME).write_bytes(self._common)
        (self._directory / FORMAT_NAME).write_text(
            json.dumps(TORCH_DIST_FORMAT), encoding="utf-8"
        )
        with collector_at_rest(lasting=True):
            super().finish(metadata, [pickle.loads(packed) for (packed,) in results])
        # torch sends it to every rank, where nobody reads it.
        metadata.state_dict_metadata, metadata.storage_data = {}, {}


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


def sealed(manifest: dict[str, Any]) -> bytes:
    """The content of `complete.json`, with a checksum of itself."""
    read_back = json.loads(json.dumps(manifest))
    return json.dumps({**read_back, _SEAL: _crc(read_back)}, indent=1).encode()


def _crc(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def read_manifest(path: Path) -> dict[str, Any] | str:
    """The manifest of a checkpoint whose files are unchanged, else what is wrong."""
    try:
        manifest = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        step, files, seal = manifest["step"], manifest["files"], manifest.pop(_SEAL)
        if step == step_in(path.name) and files.items() and seal == _crc(manifest):
            return manifest
    except OSError as error:
        what = (
            "is missing"
            if isinstance(error, FileNotFoundError)
            else f"{error.strerror}"
        )
        return f"checkpoint file {path / COMPLETE} {what}"
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return f"checkpoint file {path / COMPLETE} is damaged"


def damage_of(path: Path, expected: list[int]) -> str | None:
    """How a file differs from the size and checksum that were recorded; "" if it does not."""
    try:
        found = checksum(path)
    except FileNotFoundError:
        return f"checkpoint file {path} is missing"
    except OSError as error:
        return f"checkpoint file {path} cannot be read: {error.strerror}"
    if found[0] != expected[0]:
        return f"checkpoint file {path} is damaged: {found[0]:,} bytes instead of {expected[0]:,}"
    return (
        None
        if found == expected
        else f"checkpoint file {path} is damaged: its checksum differs"
    )
