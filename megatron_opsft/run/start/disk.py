"""Checks the disk of a run before any work: how many bytes it will write, and whether they fit."""

from functools import cache
from math import prod
from pathlib import Path
from shutil import disk_usage

from megatron_opsft.config import Config
from megatron_opsft.data.problems import held_out_source
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.families import ARCHITECTURES
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.storage.model_paths import in_cache, local_model
from megatron_opsft.models.weights.lora import adapters_of_rules
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import record
from megatron_opsft.run.start.run_directory import BEST, HELD_OUT
from megatron_opsft.runtime.durable import list_checkpoints
from megatron_opsft.runtime.formatting import number

# Bytes of a parameter's optimizer state in a checkpoint: float32 main weight and two moments.
STATE_BYTES = 12

# Compressed bytes of a response token in rollouts/: its id and text, and its log-prob.
_TOKEN_BYTES = 5
_LOGPROB_BYTES = 9


@record
class DiskUse:
    """Bytes that a run writes."""

    keep: int
    """The number of checkpoints that stay, `checkpoint.keep`."""
    checkpoint: int
    """One checkpoint."""
    checkpoints: int
    """All checkpoints at most: those that stay and the one being written."""
    model: int
    """One Hugging Face model."""
    models: int
    """All models at most: hf/ and those of best/."""
    rollouts: int
    """The responses of all steps, if each is as long as it may be."""
    held_out: int
    """The same of the responses of all evaluations."""

    @property
    def responses(self) -> int:
        """All responses that are kept, if each is as long as it may be."""
        return self.rollouts + self.held_out


def checkpoint_bytes_each(config: Config) -> int:
    """Return the bytes that a checkpoint has for each trained parameter.

    They are its optimizer state; its weight, unless that is the float32 main weight; and the weight
    of a frozen model (reference or teacher) if the method renews it.
    """
    method = config.method
    weight_bytes = _weight_bytes(config)
    num_bytes = STATE_BYTES
    if weight_bytes < 4:
        num_bytes += weight_bytes
    if method.objective(1.0).keeps_frozen_model and method.renews_frozen_model:
        num_bytes += weight_bytes
    return num_bytes


def _weight_bytes(config: Config) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4


@cache
def num_parameters(shape: ModelShape) -> int:
    """Return the number of elements of the whole Hugging Face model."""
    return sum(map(prod, WeightTable(shape).hf_shapes().values()))


def num_trained(config: Config, shape: ModelShape) -> int:
    """Return the number of elements that are trained and that checkpoints hold: with LoRA those of
    the adapters.
    """
    if not config.lora.rank:
        return num_parameters(shape)
    rules = adapters_of_rules(WeightTable(shape).exported, config.lora)
    return sum(prod(rule.mcore_shape) for rule in rules)


def disk_use(config: Config, shape: ModelShape) -> DiskUse:
    """Return the bytes that a run of this model writes, metrics and logs aside."""
    keep = config.checkpoint.keep
    num_models = 1
    if config.eval.keeps_best:
        # A resumed run may need the best model of each checkpoint's time.
        num_models += keep + 2
    carried = _carried_bytes(config.model.path, shape)
    checkpoint = num_trained(config, shape) * checkpoint_bytes_each(config)
    if not config.lora.rank:
        checkpoint += carried
    model = num_parameters(shape) * _weight_bytes(config) + carried
    return DiskUse(
        keep=keep,
        checkpoint=checkpoint,
        checkpoints=(keep + 1) * checkpoint,
        model=model,
        models=num_models * model,
        rollouts=_rollout_bytes(config),
        held_out=_held_out_bytes(config),
    )


def _carried_bytes(model: str, shape: ModelShape) -> int:
    """Return the bytes of a model's tensors of other parts, such as vision, as its files on this
    machine say; 0 if it is not here.
    """
    if not ARCHITECTURES[shape.architecture].carried:
        return 0
    try:
        directory = local_model(model) or in_cache(model)
        if directory is None:
            return 0
        # Here, not at the top: it loads torch, and plans of other models need none.
        from megatron_opsft.models.storage.stored_weights import carried_of

        carried = carried_of(directory, WeightTable(shape))
    except UserError:  # no weights, or not all of them: a run would say so
        return 0
    return sum(region.num_bytes for region in carried.values())


def _rollout_bytes(config: Config) -> int:
    """Return the most bytes of rollouts/ after all steps."""
    if not config.run.save_rollouts or config.method.has_fixed_data:
        return 0
    num_tokens = config.responses_per_step * config.rollout.max_response_tokens
    token_bytes = _TOKEN_BYTES
    if config.run.save_logprobs:
        token_bytes += _LOGPROB_BYTES
    return config.run.steps * num_tokens * token_bytes


def _held_out_bytes(config: Config) -> int:
    """Return the most bytes of held_out/ after all evaluations."""
    settings, run = config.eval, config.run
    if not run.save_rollouts:
        return 0
    num_responses = 0
    if settings.holdout or held_out_source(config.data, settings) is not None:
        num_responses = settings.num_problems * settings.samples_per_problem
    for more in settings.more:
        num_problems = more.num_problems or settings.num_problems
        samples = more.samples_per_problem or settings.samples_per_problem
        num_responses += num_problems * samples
    every = run.eval_every or run.steps or 1
    num_evaluations = len({*range(0, run.steps, every), run.steps})
    max_tokens = settings.max_response_tokens or config.rollout.max_response_tokens
    return num_evaluations * num_responses * max_tokens * _TOKEN_BYTES


def check_disk(config: Config, shape: ModelShape, *, resume: bool) -> str:
    """Check at the start of a run whether what it will write fits on its disk.

    Returns a warning if checkpoints and models do not all fit, or would not fit beside responses
    that are all as long as they may be; "" if everything fits. Errors: `UserError` if not even
    hf/ and one more checkpoint fit, so that the run could save nothing.
    """
    use = disk_use(config, shape)
    run_dir = config.run.dir
    checkpoints = run_dir / "checkpoints"
    free = disk_usage(_nearest_existing(checkpoints)).free
    to_come, in_all = use.checkpoint, use.checkpoints
    if resume:
        there = use.checkpoint * len(list_checkpoints(checkpoints))
        in_all = max(in_all - there, 0)
    else:
        # The checkpoints of a run that is replaced are deleted first.
        free += _bytes_of_files(checkpoints)
    location, and_model = str(checkpoints), ""
    responses = 0
    if _device(run_dir) == _device(checkpoints):
        location = f"run.dir={run_dir}"
        folders = (run_dir / "hf", run_dir / BEST)
        if not (resume and any(folder.is_dir() for folder in folders)):
            to_come += use.model
            in_all += use.models
            and_model = f" and hf/ {describe_bytes(use.model)}"
        # Those of a run that is resumed are there; those of one that is replaced are deleted first.
        sampled = sum(
            _bytes_of_files(run_dir / name) for name in ("rollouts", HELD_OUT)
        )
        responses = max(use.responses - sampled, 0)
    if to_come > free:
        raise UserError(
            f"{location}: a checkpoint takes {describe_bytes(use.checkpoint)}{and_model}, and "
            f"{describe_bytes(free)} are free there; make room, or give another place"
        )
    if in_all > free:
        return (
            f"{location}: {describe_bytes(free)} are free, and checkpoints and models take up to "
            f"{describe_bytes(in_all)} (checkpoint.keep={use.keep}, and the one that is written): "
            "those that do not fit are left out; make room, or lower checkpoint.keep"
        )
    if in_all + responses > free:
        return (
            f"{location}: {describe_bytes(free)} are free; checkpoints and models take up to "
            f"{describe_bytes(in_all)}, and the responses {describe_bytes(responses)} more if all "
            "are as long as they may be: a full disk would end the run; make room, or set "
            "run.save_rollouts=false"
        )
    return ""


def _nearest_existing(path: Path) -> Path:
    """Return the path itself, or the nearest directory above it that exists."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _device(path: Path) -> int:
    return _nearest_existing(path).stat().st_dev


def _bytes_of_files(directory: Path) -> int:
    """Return the bytes of all files below a directory, of those with several names once."""
    stats = [file.stat() for file in directory.rglob("*") if file.is_file()]
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())


def describe_bytes(num_bytes: int) -> str:
    """Write a number of bytes in GB, below a tenth of one in MB, with three digits below 1,000."""
    if num_bytes < 1e8:
        return f"{number(num_bytes / 1e6)} MB"
    return f"{number(num_bytes / 1e9)} GB"
