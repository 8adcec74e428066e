"""Check what `--overwrite` would delete: only a model, a conversion or an empty directory."""

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.model_paths import (
    ADAPTER_NAME,
    COPIED_PATTERNS,
    RECORD_NAME,
    has_hf_weights,
    is_dist_checkpoint,
)

# Files and folders of a model's directory; others may be somebody's own work.
MODEL_ENTRIES = (
    *COPIED_PATTERNS,
    "*.json",
    "*.safetensors",
    "*.distcp",
    ".metadata",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.py",
    "adapter",
    "onnx",
    "original",
    "README*",
    "LICENSE*",
    ".git*",
    ".cache",
    ".README.md.partial",  # a killed run of an earlier version wrote the card last
)


def check_out(out_dir: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Check that a new directory may take the name `out_dir`. Errors: `UserError`.

    sources: directories that are read meanwhile. overwrite: True if a model or a conversion of that
    name may be deleted. A source, the working directory, the home directory, and any directory that
    holds one of them, are never deleted.
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
    needed = [(source, "what is read") for source in sources]
    needed += [
        (Path.cwd(), "the working directory"),
        (Path.home(), "the home directory"),
    ]
    resolved = out_dir.resolve()
    for path, what in needed:
        if not path.resolve().is_relative_to(resolved):
            continue
        relation = f"is {what}"
        if path.resolve() != resolved:
            relation = f"holds {what} ({path})"
        raise UserError(
            f"{out_dir} {relation}; --overwrite would delete it, so choose another directory"
        )
    if out_dir.is_mount():
        raise UserError(
            f"{out_dir} is a mount point, which cannot be replaced; give a folder in it, such as "
            f"{out_dir / 'model'}"
        )
    reason = _why_no_model(out_dir)
    if reason:
        raise UserError(
            f"{out_dir} {reason}, so --overwrite will not delete it; remove it yourself or choose "
            "another directory"
        )


def _why_no_model(directory: Path) -> str | None:
    """Say why it is neither a model, nor a conversion, nor an empty directory; None if it is."""
    if not directory.is_dir():
        return "is a file"
    names = {entry.name for entry in directory.iterdir()}
    for name in sorted(names):
        if not any(fnmatch(name, pattern) for pattern in MODEL_ENTRIES):
            return f"holds {name}, which is not part of a model"
    is_converted = RECORD_NAME in names and is_dist_checkpoint(directory)
    is_hf = "config.json" in names and has_hf_weights(directory)
    is_adapter = ADAPTER_NAME in names
    if names and not (is_converted or is_hf or is_adapter):
        return "is neither a model nor a conversion"
    return None
