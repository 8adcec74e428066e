"""What `--overwrite` may delete: a model, a conversion, an empty directory, and nothing else."""

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.model_paths import (
    INDEX_NAME,
    RECORD_NAME,
    SINGLE_NAME,
    is_dist_checkpoint,
)

# What lies in a model's directory; anything else is somebody's own.
MODEL_ENTRIES = (
    *(
        "*.json",
        "*.safetensors",
        "*.distcp",
        ".metadata",
        "*.bin",
        "*.pt",
        "*.pth",
        "*.gguf",
    ),
    *(
        "tokenizer*",
        "*.model",
        "*.tiktoken",
        "vocab.txt",
        "merges.txt",
        "chat_template*",
    ),
    *("additional_chat_templates", "custom_generate", "*.py", "onnx", "original"),
    *("README*", "LICENSE*", ".git*", ".cache"),
    ".README.md.partial",  # a killed run of an earlier version wrote the card last
)


def check_out(out_dir: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Errors: `UserError` unless a new directory may take the name `out_dir`.

    sources: what is read meanwhile. overwrite: whether a model or a conversion there may be
    deleted; a source, the working directory, the home directory, and what holds one, never is.
    """
    if out_dir.is_symlink() and not out_dir.exists():
        raise UserError(
            f"{out_dir} is a link to {out_dir.readlink()}, which is not there; remove the link or "
            "choose another directory"
        )
    if not out_dir.exists():
        return
    if not overwrite:
        raise UserError(
            f"{out_dir} already exists; choose another, or give --overwrite"
        )
    needed = [(Path(source), "what is read") for source in sources]
    needed += [
        (Path.cwd(), "the working directory"),
        (Path.home(), "the home directory"),
    ]
    place = out_dir.resolve()
    for path, what in needed:
        if path.resolve().is_relative_to(place):
            found = (
                f"is {what}" if path.resolve() == place else f"holds {what} ({path})"
            )
            raise UserError(
                f"{out_dir} {found}; --overwrite would delete it, so choose another directory"
            )
    if out_dir.is_mount():
        raise UserError(
            f"{out_dir} is a mount point, which cannot be replaced; give a folder in it, such as "
            f"{out_dir / 'model'}"
        )
    if reason := _no_model(out_dir):
        raise UserError(
            f"{out_dir} {reason}, so --overwrite will not delete it; remove it yourself or choose "
            "another directory"
        )


def _no_model(directory: Path) -> str | None:
    """Why it is neither a model, nor a conversion, nor an empty directory; None if it is one."""
    if not directory.is_dir():
        return "is a file"
    for entry in sorted(directory.iterdir()):
        if not any(fnmatch(entry.name, name) for name in MODEL_ENTRIES):
            return f"holds {entry.name}, which is not part of a model"
    names = {entry.name for entry in directory.iterdir()}
    is_converted = RECORD_NAME in names and is_dist_checkpoint(directory)
    is_hf = "config.json" in names and not names.isdisjoint((SINGLE_NAME, INDEX_NAME))
    if names and not is_converted and not is_hf:
        return "is neither a model nor a conversion"
    return None
