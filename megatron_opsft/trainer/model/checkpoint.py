"""Megatron's distributed checkpoints: written atomically, verified on load, only the newest kept.

A checkpoint is a directory `step_000042` with Megatron's files and `complete.json`. It is written
under a temporary name and renamed when everything is on disk, so a directory with the final name is
whole. `load_newest` checks the files nevertheless, since disks and people damage files.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer

from megatron_opsft.errors import UserError, first_line, log
from megatron_opsft.models.storage.carried import repeat_carried, write_carried
from megatron_opsft.models.storage.dist_metadata import damage_named
from megatron_opsft.models.storage.hf_writer import side_files
from megatron_opsft.models.storage.large_files import Region
from megatron_opsft.models.storage.model_paths import (
    ADAPTER_NAME,
    CARRIED_NAME,
    COMMON_NAME,
)
from megatron_opsft.records import JsonObject
from megatron_opsft.runtime.distributed import (
    any_over_world,
    broadcast_object,
    gather_from_all,
)
from megatron_opsft.runtime.durable import (
    COMPLETE,
    PARTIAL,
    REPLACED,
    in_step_order,
    list_checkpoints,
    publish,
    put_aside,
    remove,
    step_in,
    step_name,
    write_bytes,
    write_files,
)
from megatron_opsft.runtime.parked import Whereabouts, in_place
from megatron_opsft.runtime.pinned import HostCopies
from megatron_opsft.trainer.model.checkpoint_share import (
    describe_models,
    gather_weights,
    is_tensor,
    own_share,
    read_tensors,
)
from megatron_opsft.trainer.model.checkpoint_write import (
    CheckpointWrite,
    Checksums,
    damage_of,
    read_manifest,
    sealed,
    size_and_crc,
)
from megatron_opsft.trainer.model.optimizer import (
    load_optimizer_settings,
    optimizer_settings,
)
from megatron_opsft.trainer.model.reference import ReferenceModel

# Timeout of the writers' collectives; if a rank dies, the watchdog ends the job before.
_TIMEOUT = timedelta(days=1)

# Key of the manifest: size and checksum of the carried tensors' file. It is none of `files`, whose
# damage makes a checkpoint useless.
_CARRIED = "carried"


@dataclass(eq=False)
class Checkpointer:
    """Saves and loads the state of `models` and `optimizer`, and of a reference model that was
    replaced; every rank calls every method.
    """

    directory: Path
    models: list[GPTModel]
    optimizer: ChainedOptimizer
    keep: int
    reference: ReferenceModel | None = None
    stored: Whereabouts = in_place
    """Of the trainer's tensors while it sleeps: `Offload.stored`."""
    model_dir: Path | None = None
    """Its config.json and tokenizer are copied into each checkpoint, which then can be used as a
    model.
    """
    model_files: Mapping[str, bytes] = field(default_factory=dict)
    """Files that replace those of `model_dir` there: name -> content."""
    adapter_config: bytes | None = None
    """With LoRA, the content of adapter_config.json, which names the model that the checkpoint's
    adapter belongs to.
    """
    carried: Mapping[str, Region] = field(default_factory=dict)
    """Tensors of other parts of the model than the language model, by their HF names."""

    def __post_init__(self) -> None:
        # Step and directory of the last checkpoint; only on rank 0.
        self.published: tuple[int, Path] | None = None
        self._carried_checksum: list[int] = []
        self._pending: tuple[CheckpointWrite, JsonObject] | None = None
        self._deletion: threading.Thread | None = None
        self._host_copies = HostCopies()
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def _state(self) -> dict[str, Any]:
        """Return what this rank writes: its share, and on rank 0 also the other objects."""
        models = describe_models(self.models)
        state: dict[str, Any] = {}
        if self.reference is not None and self.reference.is_replaced:
            state["reference"] = self.reference.share()
            state["has_reference"] = True
        state["share"] = own_share(
            models, self.optimizer, is_loading=False, stored=self.stored
        )
        for model_name, values in models.items():
            state[model_name] = {
                name: value for name, value in values.items() if not is_tensor(value)
            }
        state["optimizer"] = optimizer_settings(self.optimizer)
        return state

    def save(self, step: int, about: JsonObject) -> Path:
        """Write the state after `step` updates; `about` (JSON values) goes into the manifest.

        A checkpoint of the same step is replaced. Older ones beyond `keep` are deleted afterwards.
        Errors: `UserError` if it cannot be written; older ones are then unchanged.
        """
        self.start(step, about, in_background=False)
        failure = self.finish()
        self.wait_for_deletion()
        if failure:
            raise UserError(f"{failure}; make room, then continue with --resume")
        return self._named(step)

    def start(
        self, step: int, about: JsonObject, *, in_background: bool = True
    ) -> None:
        """Begin to `save`; `finish` must follow. Waits until the previous save has finished.

        in_background: copy the state, so that it may change before `finish`.
        """
        failure = self.finish()
        if failure and dist.get_rank() == 0:
            log.warning("%s", failure)
        write = CheckpointWrite(
            self._state(),
            self._named(step, PARTIAL),
            self._group,
            self._host_copies,
            copy=in_background,
        )
        self._pending = (write, {"step": step, **about})

    @property
    def is_writing(self) -> bool:
        """True while this rank is writing a checkpoint."""
        return self._pending is not None and self._pending[0].is_writing

    def finish(self, *, wait: bool = True) -> str | None:
        """Publish the checkpoint that was started, if any; return why that failed, or None.

        wait: wait for ranks that are still writing; otherwise return None while there are any.
        """
        if self._pending is None:
            return None
        write, manifest = self._pending
        if not wait and any_over_world(write.is_writing):
            return None
        self._pending = None
        failure: str | None = None
        try:
            files = write.finish()
            if dist.get_rank() == 0:
                self._publish(manifest, files)
        except UserError as error:
            failure = str(error)
        except OSError as error:
            failure = f"cannot write {self._named(manifest['step'])}: {error.strerror}"
        if failure and dist.get_rank() == 0:
            remove(self._named(manifest["step"], PARTIAL), quietly=True)
        return broadcast_object(failure)

    def _named(self, step: int, prefix: str = "step_") -> Path:
        return self.directory / step_name(step, prefix)

    def _publish(self, manifest: JsonObject, files: Checksums) -> None:
        """Give a whole checkpoint its final name and delete old ones; only on rank 0."""
        step = manifest["step"]
        final = self._named(step)
        partial = self._named(step, PARTIAL)
        if self.model_dir is not None:
            dtype = next(self.models[0].parameters()).dtype
            copied = side_files(self.model_dir, dtype)
            write_files(partial, {**copied, **self.model_files})
        if self.carried:
            self._write_carried(partial / CARRIED_NAME)
            manifest = {**manifest, _CARRIED: self._carried_checksum}
        if self.adapter_config is not None:
            write_files(partial, {ADAPTER_NAME: self.adapter_config})
        write_bytes(partial / COMPLETE, sealed({**manifest, "files": files}))
        self.wait_for_deletion()
        publish(partial, final, self._replaced(final))
        self.published = (step, final)
        to_delete = [self._replaced(final)]
        for path in list_checkpoints(self.directory)[: -self.keep]:
            put_aside(path, self._replaced(path))
            to_delete.append(self._replaced(path))
        # Large files take as long to delete as to copy; the run does not wait for it.
        self._deletion = threading.Thread(target=_delete, args=(to_delete,))
        self._deletion.start()

    def _write_carried(self, path: Path) -> None:
        """Write what no step changes; the last checkpoint has it already."""
        if self.published is not None:
            last = self.published[1] / CARRIED_NAME
            if last.is_file():
                repeat_carried(last, path)
                return
        write_carried(path, self.carried)
        self._carried_checksum = size_and_crc(path)

    def _mend_carried(self, path: Path, manifest: JsonObject) -> None:
        """Write the carried tensors of a checkpoint again if they are damaged: the model that the
        run began with has them too. Only on rank 0.
        """
        if not self.carried or _CARRIED not in manifest:
            return
        file = path / CARRIED_NAME
        damage = damage_of(file, manifest[_CARRIED])
        if damage:
            log.warning("%s; it is written again, as no step changes it", damage)
            try:
                # Under its other names, in other checkpoints, the file stays as it is.
                file.unlink(missing_ok=True)
                write_carried(file, self.carried)
            except (OSError, UserError) as error:
                log.warning("%s cannot be written again: %s", file, first_line(error))

    def _replaced(self, path: Path) -> Path:
        """Return the temporary name of a checkpoint that is deleted; a resume deletes leftovers."""
        return self._named(step_in(path.name) or 0, REPLACED)

    def wait_for_deletion(self) -> None:
        """Wait until no old checkpoint is being deleted any more."""
        if self._deletion is not None:
            self._deletion.join()

    def _restore(self, path: Path) -> None:
        failures: list[str] = []
        try:
            self._read(path)
        except UserError as error:
            failures.append(str(error))
        failure = min(gather_from_all(failures), default="")
        if failure:
            raise UserError(f"{failure}; restore it, or resume from another checkpoint")
        gather_weights(self.optimizer)

    def _read(self, path: Path) -> None:
        """Read this rank's share. No collectives."""
        with damage_named(path / COMMON_NAME):
            common = torch.load(
                path / COMMON_NAME, map_location="cpu", weights_only=True
            )
            load_optimizer_settings(self.optimizer, common["optimizer"])
        wanted = own_share(
            describe_models(self.models), self.optimizer, is_loading=True
        )
        if self.reference is not None and common.get("has_reference"):
            wanted += self.reference.share()
            self.reference.is_replaced = True
        read_tensors(wanted, path)

    def load_newest(self) -> JsonObject | None:
        """Restore the newest whole checkpoint; return its manifest, or None without checkpoints.

        Newer ones that are damaged are renamed, with a warning. Errors: `UserError` if all are
        damaged; nothing is changed then.
        """
        ordered = in_step_order(self.directory.glob("step_*"))
        newest_first = broadcast_object([path for _, path in reversed(ordered)])
        damage_by_path: dict[Path, str] = {}
        for path in newest_first:
            manifest = self._read_whole(path)
            if not isinstance(manifest, str):
                self._set_aside(damage_by_path, path)
                self._restore(path)
                if dist.get_rank() == 0:
                    self._mend_carried(path, manifest)
                return manifest
            damage_by_path[path] = manifest
        if not damage_by_path:
            return None
        raise UserError(
            f"no checkpoint in {self.directory} is whole: {'; '.join(damage_by_path.values())}; "
            "restore one, or start anew with --overwrite"
        )

    def _set_aside(self, damage_by_path: dict[Path, str], whole: Path) -> None:
        """Rename damaged checkpoints, on rank 0: they must not count as the newest ones."""
        if dist.get_rank() != 0:
            return
        for path, damage in damage_by_path.items():
            aside = path.with_name(f"damaged_{path.name}")
            put_aside(path, aside)
            log.warning(
                "%s; it is kept as %s, and the run continues from %s",
                damage,
                aside,
                whole,
            )

    def _read_whole(self, path: Path) -> JsonObject | str:
        """Return a checkpoint's manifest if all its files are unchanged, else what is damaged."""
        rank = dist.get_rank()
        manifest = broadcast_object(read_manifest(path) if rank == 0 else "")
        if isinstance(manifest, str):
            return manifest
        damages = []
        for name in sorted(manifest["files"])[rank :: dist.get_world_size()]:
            damage = damage_of(path / name, manifest["files"][name])
            if damage:
                damages.append(damage)
        return min(gather_from_all(damages), default=manifest)


def _delete(paths: list[Path]) -> None:
    for path in paths:
        try:
            remove(path)
        except OSError as error:
            log.warning(
                "an old checkpoint, %s, cannot be deleted: %s", path, error.strerror
            )
