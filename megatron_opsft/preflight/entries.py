"""What a run writes into its directory, by name; reads nothing but names."""

from pathlib import Path

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.step_names import in_step_order

ENTRIES = (
    "manifest.json",
    "config.yaml",
    "metrics.jsonl",
    "evals.jsonl",
    "summary.json",
    "bad_rows.jsonl",
    "report.html",
    "rollouts",
    "checkpoints",
    "hf",
    "exports",
    "best",
    "tensorboard",
    "wandb",
)
FAILED, FAILED_END = "failed_step_", ".json"


def entries_of(directory: Path) -> list[Path]:
    """What a run wrote there: `ENTRIES` and the batches of failed steps; directories without a file
    do not count.
    """
    written = [path for name in ENTRIES if (path := directory / name).exists()]
    written += [path for _, path in in_step_order(directory.glob("*"), FAILED, FAILED_END)]
    return [
        path
        for path in written
        if not path.is_dir() or any(child.is_file() for child in path.rglob("*"))
    ]


def check_free(directory: Path, *, resume: bool, overwrite: bool) -> None:
    """Errors: `UserError` for what is no directory, or a run that is neither continued nor
    replaced.
    """
    try:
        is_file = directory.exists() and not directory.is_dir()
    except OSError as error:
        raise unwritable(directory, error) from None
    if is_file:
        raise UserError(f"run.dir={directory} is a file; name a directory")
    if not (resume or overwrite) and entries_of(directory):
        raise UserError(
            f"run.dir={directory} holds a run already; continue it with --resume, replace it with "
            "--overwrite, or name another directory"
        )


def unwritable(directory: Path, error: OSError, option: str = "run.dir=") -> UserError:
    """What to say of a directory that cannot be made or written."""
    return UserError(
        f"{option}{directory} cannot be written ({error.strerror}); name another directory"
    )
