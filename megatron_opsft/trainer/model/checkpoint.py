"""Megatron's distributed checkpoint, made atomic, verified on load, the newest kept.

A checkpoint is a directory `step_000042` with Megatron's files and `complete.json`. It is written
under a temporary name and renamed when everything is on disk, so a directory with the final name is
whole; `load_newest` checks the files all the same, since disks and people damage files.
"""

import logging
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.dist_metadata import damage_named
from megatron_opsft.models.storage.hf_writer import side_files
from megatron_opsft.models.storage.model_paths import COMMON_NAME
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
)
from megatron_opsft.trainer.model.optimizer import load_settings, settings_of
from megatron_opsft.trainer.model.reference import ReferenceModel

log = logging.getLogger("megatron_opsft")

_PATIENCE = timedelta(
    days=1
)  # with a rank that still writes; one that is dead ends the job


@dataclass(eq=False)
class Checkpointer:
    """Saves and loads the state of `models` and `optimizer`, and of a reference model that was
    replaced; every rank calls every method.

    model_dir: whose config.json and tokenizer go into each checkpoint, which is then a model
    wherever one is meant.
    """

    directory: Path
    models: list[GPTModel]
    optimizer: ChainedOptimizer
    keep: int
    reference: ReferenceModel | None = None
    model_dir: Path | None = None
    published: tuple[int, Path] | None = field(
        default=None, init=False
    )  # on rank 0: the last one
    _pending: tuple[CheckpointWrite, dict[str, Any]] | None = field(
        default=None, init=False
    )
    _deletion: threading.Thread | None = field(default=None, init=False)
    _host_copies: HostCopies = field(default_factory=HostCopies, init=False)

    def __post_init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def _state(self) -> dict[str, Any]:
        """What this rank writes: its share, and on rank 0 also the objects that are not tensors."""
        models = describe_models(self.models)
        reference: dict[str, Any] = {}
        if self.reference is not None and self.reference.is_replaced:
            reference = {"reference": self.reference.share(), "has_reference": True}
        return {
            **reference,
            "share": own_share(models, self.optimizer, is_loading=False),
            **{
                key: {
                    name: value for name, value in each.items() if not is_tensor(value)
                }
                for key, each in models.items()
            },
            "optimizer": settings_of(self.optimizer),
        }

    def save(self, step: int, about: dict[str, Any]) -> Path:
        """Write the state after `step` updates; `about` (JSON values) goes into the manifest.

        A checkpoint of the same step is replaced. Older ones beyond `keep` are deleted afterwards.
        Errors: `UserError` where it cannot be written; the older ones are untouched then.
        """
        self.start(step, about, in_background=False)
        failure = self.finish()
        self.wait_for_deletion()
        if failure:
            raise UserError(f"{failure}; make room, then continue with --resume")
        return self._named(step)

    def start(
        self, step: int, about: dict[str, Any], *, in_background: bool = True
    ) -> None:
        """Begin to `save`; `finish` must follow. In the background the state may change meanwhile.

        Waits for the save before, if that is not finished.
        """
        if (failure := self.finish()) and dist.get_rank() == 0:
            log.warning("%s", failure)
        partial = self._named(step, PARTIAL)
        write = CheckpointWrite(
            self._state(), partial, self._group, self._host_copies, copy=in_background
        )
        self._pending = (write, {"step": step, **about})

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes a checkpoint."""
        return self._pending is not None and self._pending[0].is_writing

    def finish(self, *, wait: bool = True) -> str | None:
        """Let the checkpoint appear that was started, if any; what made it fail, or None.

        wait: also if a rank still writes; else it stays under way.
        """
        if self._pending is None:
            return None
        write, manifest = self._pending
        if not wait and any_over_world(write.is_writing):
            return None
        self._pending = None
        files = write.finish()
        failure = files if isinstance(files, str) else None
        if dist.get_rank() == 0:
            if not isinstance(files, str):
                try:
                    self._publish(manifest, files)
                except UserError as error:
                    failure = str(error)
                except OSError as error:
                    failure = f"cannot write {self._named(manifest['step'])}: {error.strerror}"
            if failure:
                remove(self._named(manifest["step"], PARTIAL), quietly=True)
        return broadcast_object(failure)

    def _named(self, step: int, before: str = "step_") -> Path:
        return self.directory / step_name(step, before)

    def _publish(self, manifest: dict[str, Any], files: Checksums) -> None:
        """On rank 0: give a whole checkpoint its name, and delete what is too old."""
        step = manifest["step"]
        final, partial = self._named(step), self._named(step, PARTIAL)
        if self.model_dir is not None:
            dtype = next(self.models[0].parameters()).dtype
            write_files(partial, side_files(self.model_dir, dtype))
        write_bytes(partial / COMPLETE, sealed({**manifest, "files": files}))
        self.wait_for_deletion()
        publish(partial, final, self._replaced(final))
        self.published = (step, final)
        too_old = list_checkpoints(self.directory)[: -self.keep]
        for path in too_old:
            put_aside(path, self._replaced(path))
        # Large files take as long to delete as to copy; the run does not wait for it.
        replaced = [self._replaced(path) for path in (final, *too_old)]
        there = [path for path in replaced if path.exists()]
        self._deletion = threading.Thread(target=_delete, args=(there,))
        self._deletion.start()

    def _replaced(self, path: Path) -> Path:
        """The name of what a killed run leaves of a checkpoint, which its resume deletes."""
        return self._named(step_in(path.name) or 0, REPLACED)

    def wait_for_deletion(self) -> None:
        """On return no old checkpoint is being deleted any more."""
        if self._deletion is not None:
            self._deletion.join()

    def _restore(self, path: Path) -> None:
        reasons: list[str] = []
        try:
            self._read(path)
        except UserError as error:
            reasons.append(str(error))
        if reasons := gather_from_all(reasons):
            raise UserError(
                f"{min(reasons)}; restore it, or resume from another checkpoint"
            )
        gather_weights(self.optimizer)

    def _read(self, path: Path) -> None:
        """This rank's part. No collectives."""
        with damage_named(path / COMMON_NAME):
            common = torch.load(
                path / COMMON_NAME, map_location="cpu", weights_only=True
            )
            load_settings(self.optimizer, common["optimizer"])
        wanted = own_share(
            describe_models(self.models), self.optimizer, is_loading=True
        )
        if self.reference is not None and common.get("has_reference"):
            wanted += self.reference.share()
            self.reference.is_replaced = True
        read_tensors(wanted, path)

    def load_newest(self) -> dict[str, Any] | None:
        """Restore the newest checkpoint that is whole; its manifest, or None if there is none.

        Damaged ones that are newer get out of the way, by another name, with a warning. Errors:
        `UserError` when all there are are damaged; nothing is changed then.
        """
        there = [
            path for _, path in reversed(in_step_order(self.directory.glob("step_*")))
        ]
        damaged: list[tuple[Path, str]] = []
        for path in broadcast_object(there):
            manifest = self._read_whole(path)
            if not isinstance(manifest, str):
                self._set_aside(damaged, path)
                self._restore(path)
                return manifest
            damaged.append((path, manifest))
        if not damaged:
            return None
        raise UserError(
            f"no checkpoint in {self.directory} is whole: {'; '.join(why for _, why in damaged)}; "
            "restore one, or start anew with --overwrite"
        )

    def _set_aside(self, damaged: list[tuple[Path, str]], whole: Path) -> None:
        """On rank 0: they must neither count among the newest nor be taken for whole."""
        if dist.get_rank() != 0:
            return
        for path, why in damaged:
            aside = path.with_name(f"damaged_{path.name}")
            put_aside(path, aside)
            log.warning(
                "%s; it is kept as %s, and the run continues from %s", why, aside, whole
            )

    def _read_whole(self, path: Path) -> dict[str, Any] | str:
        """A checkpoint's manifest if all its files are unchanged, else what is wrong."""
        manifest = broadcast_object(read_manifest(path) if dist.get_rank() == 0 else "")
        if isinstance(manifest, str):
            return manifest
        names = sorted(manifest["files"])[dist.get_rank() :: dist.get_world_size()]
        reasons = gather_from_all(
            [
                why
                for name in names
                if (why := damage_of(path / name, manifest["files"][name]))
            ]
        )
        return min(reasons) if reasons else manifest


def _delete(old: list[Path]) -> None:
    for path in old:
        try:
            remove(path)
        except OSError as error:
            log.warning(
                "an old checkpoint, %s, cannot be deleted: %s", path, error.strerror
            )
