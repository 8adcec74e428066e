"""What a conversion reads and writes; needs no torch."""

from pathlib import Path

from megatron_opsft.errors import UserError
from megatron_opsft.storage.model_paths import TINY_REASONER, newest_checkpoint, resolve_model
from megatron_opsft.storage.replacing import check_out


def find_source(name: str, to: str, out: Path, *, overwrite: bool) -> Path:
    """The directory of a model in the other format than `to`, hf or megatron. Errors: `UserError`,
    also for an output that may not be written.
    """
    if to == "megatron":
        directory = resolve_model(name, option="--hf")
    else:
        path = resolve_model(name) if name == TINY_REASONER else Path(name).expanduser()
        directory = newest_checkpoint(path)
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    check_out(out, [directory], overwrite=overwrite)
    return directory


def in_words(num_bytes: float) -> str:
    """Such as `15.23 GB`, `3.4 MB` or `812 bytes`."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.2f} GB"
    if num_bytes >= 1e5:
        return f"{num_bytes / 1e6:.1f} MB"
    return f"{num_bytes:,.0f} bytes"
