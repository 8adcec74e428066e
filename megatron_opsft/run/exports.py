"""The model of a run as Hugging Face directories: the last one, those of some steps, the best."""

from pathlib import Path

from megatron_opsft.preflight.run_directory import BEST
from megatron_opsft.runtime.distributed import broadcast_object
from megatron_opsft.runtime.durable import remove
from megatron_opsft.runtime.phase import announce, enter_phase
from megatron_opsft.runtime.step_names import in_step_order, list_checkpoints, step_in, step_name
from megatron_opsft.session import Session
from megatron_opsft.storage.hf_writer import write_hf_model


class ModelExports:
    """Every rank calls every method; rank 0 writes, whole directories or none."""

    def __init__(self, session: Session, run_dir: Path) -> None:
        self._s = session
        self._dir = run_dir

    def write(self, name: str) -> None:
        """The weights as they are, to `name` in the run's directory; what is there is replaced."""
        enter_phase("export")
        stream = self._s.sync.exporter.stream()
        if not self._s.layout.is_main:
            for _ in stream:
                pass
            return
        write_hf_model(
            self._dir / name,
            stream,
            shapes=self._s.shards.table.hf_shapes(),
            dtype=self._s.shards.parameters[0][1].dtype,
            source_dir=self._s.model_dir,
            overwrite=True,
        )

    def write_step(self, folder: str, step: int) -> None:
        """The weights after `step` updates, where a resumed run does not find them written."""
        name = f"{folder}/{step_name(step)}"
        if not broadcast_object((self._dir / name / "config.json").is_file()):
            announce(f"writing {name}")
            self.write(name)

    def drop_superseded(self, step: int, *, finished: bool = False) -> None:
        """Remove models that a better one has followed, after `step` updates.

        A run that is resumed from a checkpoint needs the newest model that is not younger: one
        stays for each checkpoint that is there or is being written, unless the run has finished.
        """
        if not self._s.layout.is_main:
            return
        there = in_step_order((self._dir / BEST).glob("*"))
        resumable = [step]
        if not finished:
            resumable += [step_in(p.name) or 0 for p in list_checkpoints(self._dir / "checkpoints")]
            resumable += [step - step % every] if (every := self._s.config.checkpoint.every) else []
        needed = {max((s for s, _ in there if s <= saved), default=0) for saved in resumable}
        for written, path in there:
            if written not in needed:
                remove(path, quietly=True)  # what is left is there the next time
