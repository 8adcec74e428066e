"""The checks of a run that need no heavy import; they take a third of a second."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from megatron_opsft.config import Config
from megatron_opsft.config.load import check_resumable, load_config
from megatron_opsft.config.training import check_world
from megatron_opsft.data.problems import ARITHMETIC, held_out_source
from megatron_opsft.data.prompt_file import open_prompt_file
from megatron_opsft.data.sources import check_source
from megatron_opsft.errors import NothingLeft, UserError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.model_paths import local_model
from megatron_opsft.rollout.limits import (
    check_engine,
    check_engine_ranks,
    check_lengths,
    fit_lengths,
)
from megatron_opsft.run.start.run_directory import RunDir
from megatron_opsft.runtime.durable import list_checkpoints
from megatron_opsft.runtime.launched import is_launched
from megatron_opsft.runtime.libraries import check_cached, check_fetched
from megatron_opsft.trainer.model.checks import check_layout, check_routing_replay
from megatron_opsft.verify.verifier import check_judge


@contextmanager
def opened_run(
    config: Config, *, resume: bool, overwrite: bool, must_exist: bool = False
) -> Iterator[None]:
    """Check the start of a run and have its directory. Called by every rank; rank 0 acts.

    must_exist: whether a resumed run must be there. Errors: `UserError`; `NothingLeft` for a run of
    one process that is finished. Several ranks agree on that when they have found each other.
    """
    is_launched()
    if int(os.environ.get("RANK", "0")):
        yield
        return
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    check_run(
        config,
        resume=resume,
        overwrite=overwrite,
        must_exist=must_exist,
        world_size=world_size,
    )
    if resume and world_size == 1 and is_finished(config):
        raise NothingLeft
    with RunDir(config.run.dir).locked():
        yield


def check_run(
    config: Config, *, resume: bool, overwrite: bool, must_exist: bool, world_size: int
) -> None:
    """Errors: `UserError` for a start that cannot succeed. Needs neither torch nor a network."""
    directory = config.run.dir
    run_dir = RunDir(directory)
    run_dir.check_start(resume=resume, overwrite=overwrite)
    if resume and list_checkpoints(directory / "checkpoints"):
        check_resumable(load_config(directory / "config.yaml"), config, directory)
    elif must_exist and not run_dir.entries():
        raise UserError(
            f"--resume: run.dir={directory} has no run to continue; leave out --resume, or give "
            "--resume=auto, which starts a new one then"
        )
    _check_model(config)
    check_world(world_size, config.parallel)
    sources = [("data.train", source.path) for source in config.data.sources]
    sources += [("eval.data", config.eval.data)] if config.eval.data is not None else []
    sources += [
        (f"eval.more.{given.name}.data", given.data) for given in config.eval.more
    ]
    for option, source in sources:
        if source != ARITHMETIC:
            check_source(source, option=option)
    open_prompt_file(config.data.template)
    check_engine(config)
    check_engine_ranks(config.rollout.tp, world_size)
    check_responses(config)
    check_judge(config.verify)
    _check_evaluations(config)
    _check_wandb(config)


def _check_model(config: Config) -> None:
    """Of a model that is here: its shape against layout and lengths."""
    model_dir = local_model(config.model.path)
    if model_dir is None:
        return check_cached("models", config.model.path, "model.path")
    shape = read_model_shape(model_dir)
    check_layout(shape, config.parallel)
    check_routing_replay(shape, config)
    positions = shape.max_position_embeddings
    check_lengths(fit_lengths(config, positions), positions)


def check_responses(config: Config) -> None:
    """Errors: `UserError` where method and data.responses do not fit, or the file is missing."""
    path, method = config.data.responses, config.method.name
    if path is not None and not config.method.has_fixed_data:
        raise UserError(
            f"data.responses={path}: method.name={method} samples its own; leave it out"
        )
    if path is None and config.method.has_fixed_data:
        raise UserError(
            f"method.name={method} trains on fixed data: set data.responses to a file that "
            f"`megatron-opsft data {method}` wrote"
        )
    if path is not None and not path.is_file():
        raise UserError(
            f"data.responses={path}: there is no such file; make it with `megatron-opsft data "
            f"{method} ... --out {path}`"
        )
    if path is not None:
        check_fetched([path])


def _check_evaluations(config: Config) -> None:
    """Errors: `UserError` for an early end that no evaluation could bring about."""
    settings = config.eval
    if not settings.stop_when_worse:
        return
    asked = f"eval.stop_when_worse={settings.stop_when_worse}"
    if not config.run.eval_every:
        raise UserError(
            f"{asked} needs evaluations between the steps: set run.eval_every"
        )
    if held_out_source(config.data, settings) is None and not settings.holdout:
        raise UserError(
            f"{asked} needs held-out problems: set eval.data or eval.holdout"
        )


def is_finished(config: Config) -> bool:
    """Whether the run has finished all its steps, or has given up as it would do again, and has
    written its model and summary.
    """
    directory = config.run.dir
    try:
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        steps = summary["steps"]
    except (OSError, ValueError, TypeError, KeyError):
        return False
    has_model = not steps or (directory / "hf" / "config.json").is_file()
    gives_up = 0 < config.eval.stop_when_worse <= summary.get("worse_in_a_row", 0)
    return has_model and bool(steps == config.run.steps or gives_up)


def _check_wandb(config: Config) -> None:
    """A folder ./wandb, such as W&B's own, counts as no package."""
    if config.run.wandb == "off":
        return
    found = find_spec("wandb")
    if found is None or found.origin is None:
        raise UserError(
            f"run.wandb={config.run.wandb} needs the wandb package: pip install wandb, or set "
            "run.wandb=off"
        )
