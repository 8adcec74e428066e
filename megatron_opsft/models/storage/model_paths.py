"""Where a model is, and the names of its files; reads no weights, and needs no torch."""

from pathlib import Path

from megatron_opsft.errors import UserError, first_line
from megatron_opsft.runtime.durable import list_checkpoints
from megatron_opsft.runtime.libraries import (
    asking_hub,
    check_fetched,
    hub_error,
    is_offline,
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
METADATA_NAME = ".metadata"  # of a distributed checkpoint
COMMON_NAME = "common.pt"  # the objects other than tensors, as Megatron names it
FORMAT_NAME = "metadata.json"  # of one: Megatron's own record of its format
TORCH_DIST_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
RECORD_NAME = (
    "conversion.json"  # marks a converted checkpoint, which may be overwritten
)
ADAPTER_NAME = "adapter_config.json"  # of what PEFT saves
TINY_REASONER = "tiny_reasoner"
ASSETS = Path(__file__).parents[2] / "assets"
MODEL_CONFIGS = (
    ASSETS / "model_configs"
)  # hub name -> config.json, of the models of the examples
HUB_PATTERNS = [
    *("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"),
    "custom_generate/*",  # not used here, but it belongs to the model that is written
]
# Copies of the weights in other formats, and whatever weights lie in folders: never loaded.
HUB_IGNORED = ["consolidated*", "onnx/*", "original/*", "*/*.safetensors"]


def resolve_model(name: str, *, option: str = "model.path") -> Path:
    """The directory of a model: a directory itself, such as a checkpoint, that of a run (whose
    `hf/` is meant), `tiny_reasoner` (shipped), or a hub name.

    The files of a hub name are downloaded once, to the Hugging Face cache. Errors: `UserError`
    where they cannot be. option: what errors call the name.
    """
    directory = _find_local(name, option) or _from_hub(name, HUB_PATTERNS, option)
    _check_complete(directory, option)
    return directory


def local_model(name: str, *, option: str = "model.path") -> Path | None:
    """As `resolve_model`, but None for a hub name: nothing is fetched. Errors: `UserError`."""
    directory = _find_local(name, option)
    if directory is not None:
        _check_complete(directory, option)
    return directory


def _find_local(name: str, option: str) -> Path | None:
    if name == TINY_REASONER:
        return ASSETS / TINY_REASONER
    path = Path(name).expanduser()
    if path.is_dir():
        if there := list_checkpoints(path):
            raise UserError(
                f"{option}={name} holds checkpoints; give one of them, such as {there[-1]}"
            )
        return _model_of_run(path, option) or path
    if path.exists():
        raise UserError(
            f"{option}={name} is a file; give the directory that holds config.json"
        )
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise UserError(
            f"{option}={name} is not a directory; give a Hugging Face model directory, a hub name "
            f"such as Qwen/Qwen3-0.6B, or {TINY_REASONER}"
        )
    return None


def _check_complete(directory: Path, option: str) -> None:
    """Errors: `UserError` for a model whose files Git LFS has not fetched, and for a LoRA adapter
    without its model.
    """
    check_fetched(sorted(directory.iterdir()))
    has_weights = any(
        (directory / weights).is_file() for weights in (SINGLE_NAME, INDEX_NAME)
    )
    if (directory / ADAPTER_NAME).is_file() and not has_weights:
        raise UserError(
            f"{option}: {directory} holds a LoRA adapter and not the whole model; merge it into "
            "its base model first (PeftModel.merge_and_unload, then save_pretrained) and give the "
            "directory of that"
        )


def _model_of_run(directory: Path, option: str) -> Path | None:
    """What a run directory holds as its model; None for any other directory. Errors: `UserError`
    for a run without a model.
    """
    is_run = (directory / "manifest.json").is_file() and not (
        directory / "config.json"
    ).exists()
    if is_run and (directory / "hf" / "config.json").is_file():
        return directory / "hf"
    if is_run and (directory / "metrics.jsonl").exists():
        there = list_checkpoints(directory / "checkpoints")
        other = f", or give its newest checkpoint, {there[-1]}" if there else ""
        raise UserError(
            f"{option}={directory} is a run that is not finished: it has no hf/; finish it with "
            f"--resume{other}"
        )
    return None


def newest_checkpoint(directory: Path) -> Path:
    """The newest checkpoint of a run's directory; any other directory unchanged."""
    there = list_checkpoints(directory / "checkpoints")
    return there[-1] if there else directory


def _from_hub(name: str, patterns: list[str], option: str) -> Path:
    """The cached snapshot of a hub name, with the files that fit the patterns."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        with asking_hub(name):
            found = snapshot_download(
                name, allow_patterns=patterns, ignore_patterns=HUB_IGNORED
            )
        return Path(found)
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        why = "HF_HUB_OFFLINE=1 is set" if is_offline() else first_line(error)
        raise hub_error(
            error,
            f"{option}={name} is not a local directory and could not be fetched from the Hugging "
            f"Face hub ({why}); download it where there is a network and give its directory",
        ) from None


def resolve_config(name: str) -> Path:
    """The directory whose config.json describes a model, for what needs no weights.

    As `resolve_model`, but a hub name whose config.json is shipped needs neither network nor cache,
    and means the same on every machine. Errors: `UserError`.
    """
    found = MODEL_CONFIGS.glob("*/*/config.json")
    shipped = {
        file.parent.relative_to(MODEL_CONFIGS).as_posix(): file.parent for file in found
    }
    if name in shipped and not Path(name).is_dir():
        return shipped[name]
    option = "model.path"
    directory = _find_local(name, option) or _from_hub(name, ["config.json"], option)
    check_fetched([directory / "config.json"])
    return directory


def is_dist_checkpoint(directory: Path) -> bool:
    """Whether a directory looks like Megatron's torch_dist format."""
    return (directory / METADATA_NAME).is_file() and (directory / FORMAT_NAME).is_file()
