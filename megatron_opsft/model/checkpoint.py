"""Megatron's distributed checkpoint, made atomic, verified on load, the newest kept.

A checkpoint is a directory `step_000042` with Megatron's files and `complete.json` (step, config
hash, and size and checksum of every file). It is written under a temporary name and renamed when
everything is on disk, so a directory with the final name is whole; `load` checks the files against
it all the same, since disks and people damage files.
"""

import json
import os
import queue
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import MegatronOptimizer

from megatron_opsft.errors import UserError
from megatron_opsft.model.optimizer import allocate_state, load_state
from megatron_opsft.runtime.distributed import gather_from_all
from megatron_opsft.runtime.durable import sync_path, write_bytes

MANIFEST = "complete.json"
_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def step_of(path: Path) -> int:
    """The step of a checkpoint directory name."""
    return int(path.name.removeprefix("step_"))


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first; temporary ones of a killed run are not among them."""
    found = [path for path in directory.glob("step_*") if (path / MANIFEST).is_file()]
    return sorted(found, key=step_of)


class Checkpointer:
    """Saves and loads the state of `models` and `optimizer`; every rank calls every method."""

    def __init__(
        self, directory: Path, models: list[Any], optimizer: MegatronOptimizer, *, keep: int
    ) -> None:
        self.directory = directory
        self._models = models
        self._optimizer = optimizer
        self._keep = keep

    def _state(self, *, is_loading: bool) -> dict[str, Any]:
        state: dict[str, Any] = {}
        metadata = dict(_FORMAT)  # a copy: Megatron adds its process groups to it
        for number, model in enumerate(self._models):
            key = "model" if len(self._models) == 1 else f"model{number}"
            state[key] = model.sharded_state_dict(metadata=metadata)
        state["optimizer"] = self._optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
        return state

    def save(self, step: int, about: dict[str, Any]) -> Path:
        """Write the state after `step` updates; `about` (JSON values) goes into the manifest.

        A checkpoint of the same step is replaced. Older ones beyond `keep` are deleted afterwards.
        """
        # An update that never came (nothing accepted so far) leaves no moments to save.
        allocate_state(self._optimizer)
        final = self.directory / f"step_{step:06d}"
        partial = self.directory / f".partial_{step:06d}"
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        _keep_write_results_here()
        dist_checkpointing.save(self._state(is_loading=False), str(partial))
        files = _checksums(partial, sync=True)
        if dist.get_rank() == 0:
            manifest = {"step": step, **about, "files": files}
            write_bytes(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
            sync_path(partial)
            (final / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(partial, final)
            sync_path(self.directory)
            for old in list_checkpoints(self.directory)[: -self._keep]:
                # The manifest first: a half-deleted checkpoint must not look whole.
                (old / MANIFEST).unlink()
                shutil.rmtree(old)
        dist.barrier()
        return final

    def load(self, path: Path) -> dict[str, Any]:
        """Restore the state; returns the manifest. Errors: `UserError` naming the damaged file."""
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        found = _checksums(path, sync=False)
        for name, expected in manifest["files"].items():
            if found.get(name) != expected:
                what = "is damaged" if name in found else "is missing"
                raise UserError(
                    f"checkpoint file {path / name} {what}; delete {path} to resume from the one "
                    "before"
                )
        allocate_state(self._optimizer)
        state = dist_checkpointing.load(self._state(is_loading=True), str(path))
        for number, model in enumerate(self._models):
            key = "model" if len(self._models) == 1 else f"model{number}"
            model.load_state_dict(state[key], strict=True)
        load_state(self._optimizer, state["optimizer"])
        return manifest


def _keep_write_results_here() -> None:
    """Give Megatron's writer a queue of this process for its results.

    By default it starts a manager process for them, for saves in the background. Ours are not, so
    that process would only cost seconds and memory, and outlive a run that is killed.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def _checksums(directory: Path, *, sync: bool) -> dict[str, list[int]]:
    """[size, CRC-32] of every file but the manifest, on every rank; each reads its share."""
    names = sorted(
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and path.name != MANIFEST
    )
    mine = names[dist.get_rank() :: dist.get_world_size()]
    pairs = [(name, _checksum(directory / name, sync=sync)) for name in mine]
    return dict(sorted(gather_from_all(pairs)))


def _checksum(path: Path, *, sync: bool) -> list[int]:
    crc = size = 0
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return [size, crc]
