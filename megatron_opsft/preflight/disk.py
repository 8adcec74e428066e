"""The disk of a run, before any work: what it writes in bytes, and whether it fits."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from shutil import disk_usage

from megatron_opsft.architectures.shape import ModelShape
from megatron_opsft.config import Config
from megatron_opsft.errors import UserError
from megatron_opsft.preflight.run_directory import BEST
from megatron_opsft.runtime.durable import list_checkpoints
from megatron_opsft.weights.rules import WeightTable

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


def disk_use(config: Config, shape: ModelShape) -> DiskUse:
    """What a run of this model writes, but for metrics and logs."""
    elements = sum(map(prod, WeightTable(shape, "te").hf_shapes().values()))
    of_weight = 2 if config.model.dtype == "bfloat16" else 4
    # In float32 the weight is the main weight.
    in_checkpoint = STATE_BYTES + (of_weight if of_weight == 2 else 0)
    method = config.method
    if method.objective(1.0).keeps_frozen_model and method.renews_frozen_model:
        in_checkpoint += of_weight
    keep, rollout = config.checkpoint.keep, config.rollout
    tokens = 0
    if config.run.save_rollouts and not method.has_fixed_data:
        assert rollout.max_response_tokens is not None  # see `fit_lengths`
        per_step = config.data.prompts_per_step * rollout.group_size * rollout.max_response_tokens
        tokens = config.run.steps * per_step
    return DiskUse(
        checkpoint=elements * in_checkpoint,
        keep=keep,
        model=elements * of_weight,
        # A resumed run may need the best model of each checkpoint's time.
        num_models=1 + (keep + 2 if config.eval.export_best else 0),
        rollouts=tokens * (_TOKEN_BYTES + (_LOGPROB_BYTES if config.run.save_logprobs else 0)),
    )


def check_disk(config: Config, shape: ModelShape, *, resume: bool) -> str:
    """A warning where not all checkpoints fit; "" where they do. Called at the start of a run.

    Errors: `UserError` where its model and one more checkpoint do not fit: the run could save
    nothing.
    """
    use, run_dir = disk_use(config, shape), config.run.dir
    checkpoints = run_dir / "checkpoints"
    there = 0
    if resume:
        there = len(list_checkpoints(checkpoints))
        models = sum((run_dir / name).is_dir() for name in ("hf", BEST))
    else:  # what an earlier run has left is deleted first
        models = 0
    free = _free(checkpoints) + (0 if resume else _held(checkpoints))
    is_one_disk = _device(run_dir) == _device(checkpoints)
    wanted = use.checkpoint + (use.model if is_one_disk and not models else 0)
    what = f"run.dir={run_dir}: " if is_one_disk else f"{checkpoints}: "
    if wanted > free:
        and_model = f" and hf/ {_gb(use.model)}" if wanted > use.checkpoint else ""
        raise UserError(
            f"{what}a checkpoint takes {_gb(use.checkpoint)}{and_model}, and {_gb(free)} are free "
            "there; make room, or give another place"
        )
    all_of_them = use.checkpoints - there * use.checkpoint
    if is_one_disk and not models:
        all_of_them += use.models
    if all_of_them > free:
        return (
            f"{what}{_gb(free)} are free, and checkpoints and models take up to "
            f"{_gb(all_of_them)} (checkpoint.keep={use.keep}, and the one that is written): those "
            "that do not fit are left out; make room, or lower checkpoint.keep"
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
