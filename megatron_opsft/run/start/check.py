"""The checks of a run that need no heavy import; together they take a third of a second."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_opsft.config import Config
from megatron_opsft.config.load import check_resumable, load_config
from megatron_opsft.data.problems import ARITHMETIC, held_out_source
from megatron_opsft.data.prompt_file import open_prompt_file
from megatron_opsft.data.sources import check_source
from megatron_opsft.errors import NothingLeft, UserError, looked_in
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.storage.adapter_config import check_same_adapter
from megatron_opsft.models.storage.model_paths import fetch_config, local_model
from megatron_opsft.rollout.limits import check_installed
from megatron_opsft.run.run_files import read_summary
from megatron_opsft.run.start.checked_run import CheckedRun, make_checked_run
from megatron_opsft.run.start.run_directory import RunDir
from megatron_opsft.runtime.durable import list_checkpoints
from megatron_opsft.runtime.launched import is_launched, launched_rank, launched_ranks
from megatron_opsft.runtime.libraries import (
    check_cached,
    check_fetched,
    is_installed,
    is_offline,
    loading_libraries,
)
from megatron_opsft.verify.handed_judge import make_handed_judge_importable
from megatron_opsft.verify.verifier import check_judge


@contextmanager
def opened_run(
    config: Config, *, resume: bool, overwrite: bool, must_exist: bool = False
) -> Iterator[CheckedRun]:
    """Check the start of a run, and hold the lock of its directory.

    Called by every rank; rank 0 alone looks at the directory, the data and the packages.
    must_exist: refuse to resume a run that is not there. Errors: `UserError`; `NothingLeft` for a
    finished run of one process. Several ranks agree later, when they are connected, on whether the
    run is finished.
    """
    is_launched()
    if launched_rank():
        yield check_on_job(config)
        return
    world_size = launched_ranks()
    checked = check_run(
        config,
        resume=resume,
        overwrite=overwrite,
        must_exist=must_exist,
        world_size=world_size,
    )
    if resume and world_size == 1 and is_finished(config):
        with loading_libraries():
            from megatron_opsft.run.start.identity import check_finished
        check_finished(checked)
        raise NothingLeft
    with RunDir(config.run.dir).locked():
        yield checked


def check_on_job(config: Config) -> CheckedRun:
    """Check that a run of this configuration can start on the ranks of this job, and return it with
    the shape of its model. Errors: `UserError`.
    """
    _find_judge(config)
    return make_checked_run(config, read_shape(config), launched_ranks())


def check_run(
    config: Config, *, resume: bool, overwrite: bool, must_exist: bool, world_size: int
) -> CheckedRun:
    """Check all that can be checked without torch.

    The network is needed only for the config.json of a model that is not on this machine. Errors:
    `UserError` for a start that cannot succeed.
    """
    directory = config.run.dir
    run_dir = RunDir(directory)
    run_dir.check_start(resume=resume, overwrite=overwrite)
    has_config = (directory / "config.yaml").is_file()
    is_over = has_config and is_finished(config)
    if resume and (is_over or list_checkpoints(directory / "checkpoints")):
        check_resumable(load_config(directory / "config.yaml"), config, directory)
    elif must_exist and not run_dir.entries():
        raise UserError(
            f"--resume: run.dir={directory} has no run to continue{looked_in(directory)}; leave "
            "out --resume, or give --resume=auto, which starts a new one then"
        )
    check_installed(config.rollout.engine)
    _check_sources(config)
    open_prompt_file(config.data.template)
    check_responses(config)
    if config.model.adapter is not None:
        check_same_adapter(config.lora, Path(config.model.adapter))
    _find_judge(config)
    check_judge(config.verify)
    _check_evaluations(config)
    _check_wandb(config)
    check_hub(config)
    # The last check: it may need the network.
    return make_checked_run(config, read_shape(config), world_size)


def read_shape(config: Config) -> ModelShape:
    """Read the config.json of the run's model; of a model of the hub nothing else is fetched."""
    name = config.model.path
    model_dir = local_model(name)
    if model_dir is None:
        check_cached("models", name, "model.path")
        model_dir = fetch_config(name)
    return read_model_shape(model_dir)


def _find_judge(config: Config) -> None:
    """Let Python find a judge that was handed over to this run, or to the run of its model."""
    model = Path(config.model.path).expanduser()
    make_handed_judge_importable(config.verify.judge, config.run.dir, model)


def _check_sources(config: Config) -> None:
    """Check that the sources of training and held-out problems can be read."""
    sources = [("data.train", source.path) for source in config.data.sources]
    if config.eval.data is not None:
        sources.append(("eval.data", config.eval.data))
    sources += [(f"eval.more.{more.name}.data", more.data) for more in config.eval.more]
    for option, path in sources:
        if path != ARITHMETIC:
            check_source(path, option=option)


def check_responses(config: Config) -> None:
    """Check that data.responses is set and a file exactly if the method trains on fixed data.

    Errors: `UserError` if not.
    """
    path, method = config.data.responses, config.method.name
    if path is None:
        if config.method.has_fixed_data:
            raise UserError(
                f"method.name={method} trains on fixed data: set data.responses to a file that "
                f"`megatron-opsft data {method}` wrote"
            )
        return
    if not config.method.has_fixed_data:
        raise UserError(
            f"data.responses={path}: method.name={method} samples its own; leave it out"
        )
    if not path.is_file():
        raise UserError(
            f"data.responses={path}: there is no such file{looked_in(path)}; make it with "
            f"`megatron-opsft data {method} ... --out {path}`"
        )
    check_fetched([path])


def _check_evaluations(config: Config) -> None:
    """Check that a run with `eval.stop_when_worse` has evaluations that could end it.

    Errors: `UserError` if not.
    """
    settings, needs = config.eval, ""
    if not config.run.eval_every:
        needs = "evaluations between the steps: set run.eval_every"
    elif held_out_source(config.data, settings) is None and not settings.holdout:
        needs = "held-out problems: set eval.data or eval.holdout"
    if settings.stop_when_worse and needs:
        raise UserError(
            f"eval.stop_when_worse={settings.stop_when_worse} needs {needs}"
        )


def is_finished(config: Config) -> bool:
    """True if the run is over and has written its model and summary.

    A run is over after all its steps, or if it gave up and would do so again with this
    configuration.
    """
    directory = config.run.dir
    try:
        summary = read_summary(directory)
    except (OSError, UserError):
        return False
    steps = summary.get("steps")
    has_model = steps == 0 or (directory / "hf" / "config.json").is_file()
    gives_up = 0 < config.eval.stop_when_worse <= summary.get("worse_in_a_row", 0)
    return has_model and (steps == config.run.steps or gives_up)


def _check_wandb(config: Config) -> None:
    """Check that Weights & Biases is installed if the run writes to it."""
    if config.run.wandb != "off" and not is_installed("wandb"):
        raise UserError(
            f"run.wandb={config.run.wandb} needs the wandb package: pip install wandb, or set "
            "run.wandb=off"
        )


def check_hub(config: Config) -> None:
    """Check, without asking the hub, that the run can upload its model there, if it is to.

    Errors: `UserError` if there is no model, no package, no token, or offline mode is set.
    """
    name = config.export.push_to_hub
    if name is None:
        return
    option = f"export.push_to_hub={name}"
    if config.run.steps == 0:
        raise UserError(
            f"{option}: a run with run.steps=0 writes no model; leave it out"
        )
    if not is_installed("huggingface_hub"):
        raise UserError(
            f"{option} needs the huggingface_hub package: pip install huggingface_hub"
        )
    if is_offline():
        raise UserError(
            f"{option}: HF_HUB_OFFLINE=1 is set, so nothing can be uploaded; unset it, or leave "
            f"the key out and run `hf upload {name} {config.run.dir / 'hf'} .` later"
        )
    from huggingface_hub import get_token

    if get_token() is None:
        raise UserError(
            f"{option} needs a token that may write there: set HF_TOKEN, or run `hf auth login`"
        )
