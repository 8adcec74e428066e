"""Opens a run's directory for its recorder: a new one, or one that is resumed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_opsft.callback import Callback
from megatron_opsft.config.load import load_config, to_yaml
from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.stored_weights import directories_of
from megatron_opsft.run.record.recorder import RunRecorder
from megatron_opsft.run.record.summary import make_manifest, note_adjustments
from megatron_opsft.run.start.identity import check_same_run
from megatron_opsft.run.start.run_directory import RunDir
from megatron_opsft.run.start.session import Session
from megatron_opsft.runtime.durable import list_checkpoints, write_text


@contextmanager
def open_recorder(
    session: Session,
    *,
    resume: bool,
    overwrite: bool,
    callbacks: Sequence[Callback] = (),
) -> Iterator[RunRecorder]:
    """Create the run directory, or load its newest checkpoint. Called by every rank.

    Errors: `UserError` for a directory that holds a run already, or a resume that would not
    continue the same run.
    """
    config = session.config
    run_dir = RunDir(config.run.dir)
    earlier = {}
    if session.layout.is_main:
        needed = directories_of(session.model_dir)
        needed += [Path(source.path) for source in config.data.sources]
        if config.model.adapter is not None:
            needed.append(Path(config.model.adapter))
        run_dir.open(resume=resume, overwrite=overwrite, needed=needed)
        if resume:
            earlier = run_dir.read_manifest() or {}
    manifest = make_manifest(session, earlier)
    last_step = 0
    if resume:
        if list_checkpoints(session.checkpointer.directory):
            check_same_run(manifest["identity"], session, config)
        checkpoint = session.checkpointer.load_newest()
        if checkpoint:
            last_step = checkpoint["step"]
            fresh_state = {"step": last_step + 1}
            session.method.restore(checkpoint.get("method_state", fresh_state))
    if last_step > config.run.steps:
        raise UserError(
            f"run.steps={config.run.steps}, but {config.run.dir} has a checkpoint of step "
            f"{last_step}; raise it"
        )
    if session.layout.is_main:
        run_dir.truncate(after_step=last_step)
        manifest["adjusted"] = earlier.get("adjusted", [])
        if last_step:
            before = load_config(run_dir.path / "config.yaml")
            versions = earlier.get("versions", {})
            manifest["adjusted"] += note_adjustments(
                before, config, versions, last_step
            )
        # First the manifest: without it nothing in the directory counts as a run's.
        run_dir.write_manifest(manifest)
        write_text(run_dir.path / "config.yaml", to_yaml(config))
        run_dir.save_bad_rows(session.bad_rows)
    base_sha256 = manifest["identity"]["model"]["weights_sha256"]
    recorder = RunRecorder(session, last_step, callbacks, base_sha256)
    if resume:
        recorder.say_resumed()
    try:
        yield recorder
    finally:
        recorder.close()
