"""The disk of a run, before any work: what it writes in bytes, and whether it fits."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from shutil import disk_usage

from megatron_opsft.config import Config
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.run.start.run_directory import BEST
from megatron_opsft.runtime.durable import list_checkpoints

# Of a parameter in a checkpoint: float32 main weight and two moments.
STATE_BYTES = 12
# Of a response's token in rollouts/, compressed: its id and its text, and its log-prob.
_TOKEN_BYTES, _LOGPROB_BYTES = 5, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """Bytes that a run writes. keep: `checkpoint.keep`."""

    checkpoint: int  # one of them
    keep: int
    model: int  # hf/, and each model of best/
    num_models: int  # hf/ and those that best/ may hold
    rollouts: int  # of all steps, where every response is as long as it may be

    @property
    def checkpoints(self) -> int:
        """What checkpoints take at most: those that are kept and the one that is written."""
        return (self.keep + 1) * self.checkpoint

    @property
    def models(self) -> int:
        """What hf/ and best/ take at most."""
        return self.num_models * self.model


def checkpoint_bytes_each(config: Config) -> int:
    """Bytes that a checkpoint has for each parameter: its state, its weight where that is not the
    main weight (float32), and that of a frozen model which the method renews.
    """
    method, of_weight = config.method, _weight_bytes(config)
    renews = method.objective(1.0).keeps_frozen_model and method.renews_frozen_model
    return (
        STATE_BYTES + (of_weight if of_weight < 4 else 0) + (of_weight if renews else 0)
    )


def _weight_bytes(config: Config) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4


def disk_use(config: Config, shape: ModelShape) -> DiskUse:
    """What a run of this model writes, but for metrics and logs."""
    elements = sum(map(prod, WeightTable(shape, "te").hf_shapes().values()))
    keep, rollout = config.checkpoint.keep, config.rollout
    tokens = 0
    if config.run.save_rollouts and not config.method.has_fixed_data:
        assert rollout.max_response_tokens is not None  # see `fit_lengths`
        per_step = (
            config.data.prompts_per_step
            * rollout.group_size
            * rollout.max_response_tokens
        )
        tokens = config.run.steps * per_step
    return DiskUse(
        checkpoint=elements * checkpoint_bytes_each(config),
        keep=keep,
        model=elements * _weight_bytes(config),
        # A resumed run may need the best model of each checkpoint's time.
        num_models=1 + (keep + 2 if config.eval.keeps_best else 0),
        rollouts=tokens
        * (_TOKEN_BYTES + (_LOGPROB_BYTES if config.run.save_logprobs else 0)),
    )


def check_disk(config: Config, shape: ModelShape, *, resume: bool) -> str:
    """A warning where not all checkpoints fit; "" where they do. Called at the start of a run.

    Errors: `UserError` where its model and one more checkpoint do not fit: the run could save
    nothing.
    """
    use, run_dir = disk_use(config, shape), config.run.dir
    checkpoints = run_dir / "checkpoints"
    free = _free(checkpoints)
    num_there, has_models = 0, False
    if resume:
        num_there = len(list_checkpoints(checkpoints))
        has_models = (run_dir / "hf").is_dir() or (run_dir / BEST).is_dir()
    else:  # what an earlier run has left is deleted first
        free += _held(checkpoints)
    is_one_disk = _device(run_dir) == _device(checkpoints)
    models_come = is_one_disk and not has_models
    place = f"run.dir={run_dir}" if is_one_disk else str(checkpoints)
    if use.checkpoint + (use.model if models_come else 0) > free:
        and_model = f" and hf/ {_gb(use.model)}" if models_come else ""
        raise UserError(
            f"{place}: a checkpoint takes {_gb(use.checkpoint)}{and_model}, and {_gb(free)} are "
            "free there; make room, or give another place"
        )
    to_come = (
        use.checkpoints
        - num_there * use.checkpoint
        + (use.models if models_come else 0)
    )
    if to_come > free:
        return (
            f"{place}: {_gb(free)} are free, and checkpoints and models take up to {_gb(to_come)} "
            f"(checkpoint.keep={use.keep}, and the one that is written): those that do not fit are "
            "left out; make room, or lower checkpoint.keep"
        )
    return ""


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest directory above it that is there."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _free(path: Path) -> int:
    return disk_usage(_nearest(path)).free


def _device(path: Path) -> int:
    return _nearest(path).stat().st_dev


def _held(directory: Path) -> int:
    """Bytes of the files in it."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3g} GB"
