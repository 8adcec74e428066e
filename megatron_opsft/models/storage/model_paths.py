"""Find the directory of a model, and name its files. No weights are read, torch is not needed."""

import json
from pathlib import Path

from megatron_opsft.errors import UserError, first_line, looked_in
from megatron_opsft.records import JsonObject
from megatron_opsft.runtime.durable import list_checkpoints
from megatron_opsft.runtime.libraries import (
    asking_hub,
    check_fetched,
    hub_error,
    is_offline,
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
METADATA_NAME = ".metadata"  # says where a distributed checkpoint stores each tensor
# Megatron's name for a checkpoint's objects other than tensors.
COMMON_NAME = "common.pt"
FORMAT_NAME = "metadata.json"  # Megatron's own record of a checkpoint's format
TORCH_DIST_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# Marks a converted checkpoint, which may be overwritten.
RECORD_NAME = "conversion.json"
STACKS_EXPERTS = "stacks_experts"
"""Key in `RECORD_NAME`: whether the files of the model stacked its experts."""
# In a checkpoint: tensors of other parts of the model than the language model.
CARRIED_NAME = "carried.safetensors"
ADAPTER_NAME = "adapter_config.json"  # PEFT saves it with a LoRA adapter
ADAPTER_WEIGHTS = "adapter_model.safetensors"
TINY_REASONER = "tiny_reasoner"
ASSETS = Path(__file__).parents[2] / "assets"
# Hub name -> config.json, for the models of the examples.
MODEL_CONFIGS = ASSETS / "model_configs"
HUB_PATTERNS = [
    "*.json",
    "*.safetensors",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "custom_generate/*",  # not used here, but it belongs to the model that is written
]
# Files and folders that are copied from a model to one that is made from it, besides config.json.
COPIED_PATTERNS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "tekken.json",
    "*.model",
    "chat_template*",
    "additional_chat_templates",
    "*processor_config.json",  # of images and videos
    "custom_generate",
)
# Never loaded: copies of the weights in other formats, and all weights in folders.
HUB_IGNORED = ["consolidated*", "onnx/*", "original/*", "*/*.safetensors"]


def resolve_model(name: str, *, option: str = "model.path") -> Path:
    """Return the directory of a model. name: a directory, such as a checkpoint, the directory of a
    run (whose `hf/` is taken), `tiny_reasoner` (shipped), or a hub name.

    The files of a hub name are downloaded once, to the Hugging Face cache. option: the setting that
    errors name. Errors: `UserError`.
    """
    directory = _find_local(name, option) or _from_hub(name, HUB_PATTERNS, option)
    _check_complete(directory, option)
    return directory


def local_model(name: str, *, option: str = "model.path") -> Path | None:
    """Do the same as `resolve_model`, but fetch nothing: a hub name gives None."""
    directory = _find_local(name, option)
    if directory is not None:
        _check_complete(directory, option)
    return directory


def check_holds_no_checkpoints(directory: Path, option: str) -> None:
    """Check that a directory is no folder of a run's checkpoints, of which one must be chosen.

    option: the setting that the error names. Errors: `UserError`.
    """
    checkpoints = list_checkpoints(directory)
    if checkpoints:
        raise UserError(
            f"{option}={directory} holds checkpoints; give one of them, such as {checkpoints[-1]}"
        )


def _find_local(name: str, option: str) -> Path | None:
    """Return the directory of a model on this machine, see `resolve_model`; None for a hub name.

    Errors: `UserError` for what can be neither.
    """
    if name == TINY_REASONER:
        return ASSETS / TINY_REASONER
    path = Path(name).expanduser()
    if path.is_dir():
        check_holds_no_checkpoints(path, option)
        return _model_of_run(path, option) or path
    if path.exists():
        raise UserError(
            f"{option}={name} is a file; give the directory that holds config.json"
        )
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise UserError(
            f"{option}={name} is not a directory{looked_in(name)}; give a Hugging Face model "
            f"directory, a hub name such as Qwen/Qwen3-0.6B, or {TINY_REASONER}"
        )
    return None


def _check_complete(directory: Path, option: str) -> None:
    """Check that Git LFS has fetched the files of a model, and that it is not a LoRA adapter
    without its model. Errors: `UserError`.
    """
    check_fetched(sorted(directory.iterdir()))
    is_whole = has_hf_weights(directory) or is_dist_checkpoint(directory)
    if (directory / ADAPTER_NAME).is_file() and not is_whole:
        raise UserError(
            f"{option}: {directory} holds a LoRA adapter and not the whole model; merge it first "
            f"(megatron-opsft convert merge {directory} --out DIR) and give that directory, or to "
            "train it further set model.adapter to it and model.path to its base model"
        )


def _model_of_run(directory: Path, option: str) -> Path | None:
    """Return the directory of a run's model; None if `directory` is not a run. Errors: `UserError`
    for a run without a model.
    """
    has_config = (directory / "config.json").exists()
    if has_config or not (directory / "manifest.json").is_file():
        return None
    if (directory / "hf" / "config.json").is_file():
        return directory / "hf"
    if (directory / "metrics.jsonl").exists():
        checkpoints = list_checkpoints(directory / "checkpoints")
        advice = "finish it with --resume"
        if checkpoints:
            advice += f", or give its newest checkpoint, {checkpoints[-1]}"
        raise UserError(
            f"{option}={directory} is a run that is not finished: it has no hf/; {advice}"
        )
    return None


def newest_checkpoint(directory: Path) -> Path:
    """Return the newest checkpoint of a run's directory; any other directory itself."""
    checkpoints = list_checkpoints(directory / "checkpoints")
    return checkpoints[-1] if checkpoints else directory


def _from_hub(name: str, patterns: list[str], option: str) -> Path:
    """Download the files of a hub name that fit the patterns, and return their directory."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        with asking_hub(name):
            directory = snapshot_download(
                name, allow_patterns=patterns, ignore_patterns=HUB_IGNORED
            )
        return Path(directory)
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        why = "HF_HUB_OFFLINE=1 is set" if is_offline() else first_line(error)
        raise hub_error(
            error,
            f"{option}={name} is not a local directory and could not be fetched from the Hugging "
            f"Face hub ({why}); download it where there is a network and give its directory, "
            f"which was looked for{looked_in(name)}",
        ) from None


def in_cache(name: str) -> Path | None:
    """Return the directory of a hub name in the Hugging Face cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def resolve_config(name: str) -> Path:
    """Return the directory whose config.json describes a model, for callers that need no weights.

    It does the same as `resolve_model`, except that a hub name whose config.json is shipped needs
    neither network nor cache, and means the same on every machine. Errors: `UserError`.
    """
    directory = _find_local(name, "model.path")
    if directory is None:
        directory = MODEL_CONFIGS / name
        if not (directory / "config.json").is_file():
            directory = fetch_config(name)
    check_fetched([directory / "config.json"])
    return directory


def has_config_here(name: str) -> bool:
    """True if `resolve_config` needs no network for a model: its config.json is in a directory of
    this machine, shipped, or in the Hugging Face cache.
    """
    try:
        directory = _find_local(name, "model.path")
    except UserError:
        return False
    if directory is None and (MODEL_CONFIGS / name / "config.json").is_file():
        return True
    directory = directory or in_cache(name)
    return directory is not None and (directory / "config.json").is_file()


def fetch_config(name: str) -> Path:
    """Fetch the config.json of a model of the hub; return its directory. Errors: `UserError`."""
    return _from_hub(name, ["config.json"], "model.path")


def has_hf_weights(directory: Path) -> bool:
    """True if a directory holds weights in Hugging Face's format."""
    return (directory / SINGLE_NAME).is_file() or (directory / INDEX_NAME).is_file()


def is_dist_checkpoint(directory: Path) -> bool:
    """True if a directory looks like a checkpoint in Megatron's torch_dist format."""
    return (directory / METADATA_NAME).is_file() and (directory / FORMAT_NAME).is_file()


def read_record(checkpoint: Path) -> JsonObject:
    """Return what a converted checkpoint says of its model; {} if another program wrote it."""
    try:
        record = json.loads((checkpoint / RECORD_NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
