"""Writes the models of a run as Hugging Face directories: the last one (hf/), the best ones
(best/), and with LoRA the adapter (adapter/).
"""

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from megatron_opsft.models.storage.adapter_config import adapter_config_json
from megatron_opsft.models.storage.adapters import adapter_files
from megatron_opsft.models.storage.hf_files import stacks_experts
from megatron_opsft.models.storage.hf_writer import write_hf_model
from megatron_opsft.models.storage.model_paths import ADAPTER_NAME
from megatron_opsft.models.storage.partial import written_whole
from megatron_opsft.models.storage.replacing import check_out
from megatron_opsft.models.storage.stored_weights import carried_of
from megatron_opsft.models.weights.lora import adapters_of_rules
from megatron_opsft.run.record.summary import card_of_adapter
from megatron_opsft.run.start.run_directory import ADAPTER, BEST
from megatron_opsft.run.start.session import Session, log
from megatron_opsft.run.sync.export import Exporter
from megatron_opsft.runtime.distributed import broadcast_object
from megatron_opsft.runtime.durable import (
    FullDiskError,
    in_step_order,
    list_checkpoints,
    remove,
    step_name,
    sync_path,
    write_files,
)
from megatron_opsft.runtime.phase import announce, enter_phase


def write_final(s: Session, card: str) -> None:
    """Write the current weights to hf/, replacing it, and with LoRA the adapter to adapter/. Called
    by every rank.

    card: the text of the model's README.md; only rank 0's counts. Errors: those of `_write_model`.
    """
    adapter = _gather_adapter(s)
    _write_model(s, "hf", {"README.md": card.encode()} if card else {})
    if adapter:
        place = s.config.run.dir / ADAPTER
        _replace_directory(place, _with_card(adapter, card, place))


def _write_model(s: Session, name: str, more_files: Mapping[str, bytes]) -> None:
    """Write the current weights to the folder `name` of the run's directory, as a whole or not at
    all, replacing it. With LoRA they are merged. Called by every rank.

    more_files: rank 0's are written too, name -> content. Errors, on rank 0: those of
    `write_hf_model`. After a `FullDiskError` the ranks can go on.
    """
    enter_phase("export")
    stream = s.sync.exporter.stream()
    failure: FullDiskError | None = None
    if s.layout.is_main:
        try:
            write_hf_model(
                s.config.run.dir / name,
                stream,
                shapes=s.shards.table.hf_shapes(),
                dtype=s.shards.dtype,
                source_dir=s.model_dir,
                carried=carried_of(s.model_dir, s.shards.table),
                stack_experts=stacks_experts(s.shards.table, s.model_dir),
                more_files={**s.model_files, **more_files},
                overwrite=True,
            )
        except FullDiskError as error:
            failure = error
    # Every rank takes part to the end of the stream, also if rank 0 cannot write.
    for _ in stream:
        pass
    if failure is not None:
        raise failure


def _replace_directory(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write a directory of small files, as a whole or not at all."""
    check_out(directory, [], overwrite=True)
    with written_whole(directory) as written:
        write_files(written.directory, files)


def _gather_adapter(s: Session) -> dict[str, bytes]:
    """Return the files of the run's adapter as PEFT reads it, name -> content; {} without LoRA and
    on ranks other than 0. Called by every rank.
    """
    if not s.config.lora.rank:
        return {}
    rules = adapters_of_rules(s.shards.table.exported, s.config.lora)
    factors_here = partial(s.shards.adapter_factors, s.sync.on_device)
    stream = Exporter(rules, factors_here, s.layout).stream()
    if s.layout.is_main:
        config = adapter_config_json(s.config.model, s.config.lora, s.model_dir)
        return adapter_files(stream, config)
    for _ in stream:
        pass
    return {}


def _with_card(
    adapter: Mapping[str, bytes], card: str, place: Path
) -> dict[str, bytes]:
    """Return the files of an adapter, with the card of its merged model made the adapter's.

    place: the directory that it will be in.
    """
    base = json.loads(adapter[ADAPTER_NAME])["base_model_name_or_path"]
    return {**adapter, "README.md": card_of_adapter(card, base, place).encode()}


def best_model(s: Session, step: int) -> Path:
    """Return the directory in best/ of the model of that step."""
    return s.config.run.dir / BEST / step_name(step)


def has_best(s: Session, step: int) -> bool:
    """True on every rank if best/ has the model of that step. Called by every rank."""
    return broadcast_object((best_model(s, step) / "config.json").is_file())


def copy_best(s: Session, step: int, card: str) -> None:
    """Copy the model of that step from best/ to hf/, replacing it, and its adapter to adapter/.
    Called by every rank.

    card: see `write_final`.
    """
    enter_phase("export")
    if not s.layout.is_main:
        return
    best, target = best_model(s, step), s.config.run.dir / "hf"
    check_out(target, [best], overwrite=True)
    with written_whole(target) as written:
        for path in best.rglob("*"):
            name = path.relative_to(best)
            if name.parts[0] == ADAPTER or not path.is_file():
                continue
            copy = written.directory / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            sync_path(copy)
        write_files(written.directory, {"README.md": card.encode()})
    if (best / ADAPTER).is_dir():
        files = {path.name: path.read_bytes() for path in (best / ADAPTER).iterdir()}
        place = s.config.run.dir / ADAPTER
        _replace_directory(place, _with_card(files, card, place))


def write_best(s: Session, step: int, card: str) -> None:
    """Write the weights after `step` updates to best/, unless a resumed run finds them there.
    Called by every rank.

    card: see `write_final`. If the disk is full, the run goes on without them after a warning.
    """
    name = f"{BEST}/{step_name(step)}"
    if not has_best(s, step):
        announce(f"writing {name}")
        try:
            adapter = _gather_adapter(s)
            if adapter:
                adapter = _with_card(adapter, card, best_model(s, step) / ADAPTER)
            inside = {f"{ADAPTER}/{file}": adapter[file] for file in adapter}
            _write_model(s, name, {"README.md": card.encode(), **inside})
        except FullDiskError as error:
            log.warning("%s; the best model is not kept, and the run continues", error)


def drop_superseded(s: Session, step: int, *, finished: bool = False) -> None:
    """Remove models of best/ that a better one has replaced, after `step` updates. Called by every
    rank.

    A run resumed from a checkpoint needs the best model of that time, which is the newest one
    before the checkpoint. So one model stays for each checkpoint that exists or is being
    written, unless the run has finished.
    """
    if not s.layout.is_main:
        return
    run_dir, every = s.config.run.dir, s.config.checkpoint.every
    resumable_steps = [step]
    if not finished:
        checkpoints = in_step_order(list_checkpoints(run_dir / "checkpoints"))
        resumable_steps += [saved for saved, _ in checkpoints]
        if every:  # the last one that was due may still be on its way to the disk
            resumable_steps.append(step - step % every)
    models = in_step_order((run_dir / BEST).glob("*"))
    needed_steps = set()
    for resumable in resumable_steps:
        up_to_there = [of_step for of_step, _ in models if of_step <= resumable]
        needed_steps.update(up_to_there[-1:])  # the newest, if there is one
    for of_step, path in models:
        if of_step not in needed_steps:
            # What cannot be removed now is tried again the next time.
            remove(path, quietly=True)
